"""Connections among the processes of one machine that know each other's addresses.

They are Unix sockets with abstract names, to which every user of the machine can connect. So both sides prove that they
know a key of the side that listens (`contract/links`). Who does not know it delays nobody: all handshakes go on at
once, and a process whose connection was closed for want of room, or finds no room in the queue of a listener, tries
again.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from typing import TYPE_CHECKING

from paceline.contract.handshake import HandshakeError
from paceline.contract.links import Acceptor, listen_here

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

SECONDS = 120.0  # for all connections of a process
_PAUSE = 0.01  # seconds before another try


class LocalListener:
    """Listens for other processes of this machine, and connects to their listeners.

    Attributes:
        address: what the others must know, and nobody else: it has the key.
    """

    def __init__(self) -> None:
        """Listen with a new name."""
        name, self._key = f"paceline-{secrets.token_hex(16)}", secrets.token_bytes(32)
        self.address = json.dumps([name, self._key.hex()])
        self._server = listen_here(name)

    def close(self) -> None:
        """Listen no longer; the connections that `connect` has returned stay."""
        self._server.close()

    def connect(self, own: int, addresses: Mapping[int, str], expected: Collection[int]) -> dict[int, socket.socket]:
        """Connect to `addresses`, and wait for `expected` to connect; all of them must do so at the same time."""
        links: dict[int, socket.socket] = {}
        until = time.monotonic() + SECONDS
        acceptor = Acceptor(
            self._server, self._key, lambda number: number in expected and number not in links, len(expected)
        )
        try:
            with contextlib.closing(acceptor):
                while len(links) < len(addresses) + len(expected):
                    remaining = until - time.monotonic()
                    if remaining < 0:
                        raise TimeoutError(f"another rank did not connect within {SECONDS:g} s")
                    missing = addresses.keys() - links.keys() - acceptor.begun
                    has_begun = [_begin(acceptor, own, number, addresses[number]) for number in missing]
                    for number, link in acceptor.accept(remaining if all(has_begun) else _PAUSE):
                        links[number] = link.socket
        except BaseException as error:
            for sock in links.values():
                sock.close()
            if isinstance(error, HandshakeError):
                raise PermissionError("another program listens at the address of a rank") from error
            raise
        return links


def _begin(acceptor: Acceptor, own: int, number: int, address: str) -> bool:
    """Begin to connect to a process; returns whether there was room in its queue."""
    name, key = json.loads(address)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        sock.connect(f"\0{name}")
        acceptor.begin(sock, bytes.fromhex(key), own, number)
    except BaseException as error:
        sock.close()
        if not isinstance(error, (BlockingIOError, BrokenPipeError, ConnectionResetError)):
            raise
        return False
    return True
