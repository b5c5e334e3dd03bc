"""Which processes share a machine."""

from __future__ import annotations

import os
import secrets
import socket


def machine_id() -> str:
    """Identifies this machine until its next start; a container with a network of its own counts as another machine.

    Processes that share it reach each other over the loopback interface, and by the abstract names of Unix sockets.
    Where the kernel does not say enough, it is a random one, which nobody shares.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {socket.gethostname()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return secrets.token_hex(16)
