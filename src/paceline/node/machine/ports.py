"""Free TCP ports that stay free until the ranks take them."""

from __future__ import annotations

import contextlib
import errno
import socket


class PortInUse(OSError):
    """Another process listens on the port."""


class Reservation:
    """Holds ports without listening on them.

    The kernel gives the port of a bound socket to no other process. A rank can still bind it and listen on it when both
    set SO_REUSEADDR and SO_REUSEPORT (Linux `man 7 socket`).
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def take(self, port: int = 0) -> int:
        """Reserve `port`, or any free one; returns its number."""
        if port and is_listening(port):
            raise PortInUse(errno.EADDRINUSE, f"port {port} is in use")
        try:
            sock = _bound(socket.AF_INET, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(errno.EADDRINUSE, f"port {port} is in use") from error
            raise
        self._sockets.append(sock)
        number = int(sock.getsockname()[1])
        with contextlib.suppress(OSError):  # this machine has no IPv6, or somebody has the port there
            self._sockets.append(_bound(socket.AF_INET6, number))
        return number

    def release(self) -> None:
        """Give all ports back."""
        while self._sockets:
            self._sockets.pop().close()


def _bound(family: socket.AddressFamily, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("", port))
    except OSError:
        sock.close()
        raise
    return sock


def is_listening(port: int) -> bool:
    """Whether a process on this machine has `port` (sharing it or not), found by trying to bind without sharing."""
    for family, address in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # no such family here
        with sock:
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
            try:
                sock.bind((address, port))
                sock.listen(1)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return True
    return False
