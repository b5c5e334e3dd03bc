"""Which processes share a machine."""

from __future__ import annotations

import os


def machine_id() -> str:
    """Identifies this machine until its next start; a container with a network of its own counts as another machine.

    Processes that share it reach each other over the loopback interface, and by the abstract names of Unix sockets.
    Where the kernel does not say enough, it is a random one, which nobody shares.
    """
    import secrets  # those that ask for the last start alone need neither
    import socket

    boot = boot_id()
    try:
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        boot = ""
    return f"{boot} {socket.gethostname()} {network}" if boot else secrets.token_hex(16)


def boot_id() -> str:
    """Identifies the time since the machine's last start; empty where the kernel has no such file."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
