"""Unix sockets: names that are short enough for the kernel, and who is at the other end."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def reachable(path: str | Path) -> Iterator[str]:
    """Another path to a socket, of at most 107 bytes: its address can hold no more."""
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process at the other end of a connection."""
    from socket import SO_PEERCRED, SOL_SOCKET  # whoever has a connection has imported it

    credentials = connection.getsockopt(SOL_SOCKET, SO_PEERCRED, 12)
    pid, uid = (int.from_bytes(credentials[at : at + 4], sys.byteorder) for at in (0, 4))
    return pid, uid
