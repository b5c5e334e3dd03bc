"""Connections among the processes of one machine that know each other's addresses.

They are Unix sockets with abstract names, which every user of the machine can see and connect to. So both sides prove
that they know a key of the side that listens (`contract/handshake.py`). Who does not know it is closed after a while,
and delays nobody: all handshakes go on at once, and a process whose connection was closed for want of room, or finds no
room in the queue of a listener, tries again.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import selectors
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.contract.handshake import Acceptance, HandshakeError, Initiation

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

SECONDS = 120.0  # for all connections of a process
_STRANGER_SECONDS = 5.0  # for a handshake with a process of another user
_MOST_STRANGERS = 64  # handshakes with these at a time
_MOST = 256  # handshakes with processes of this user, beside those that are expected
_BACKLOG = 4096  # connections that wait for `accept`; the kernel may allow fewer
_BATCH = 64  # of them that are accepted before something else is done
_PAUSE = 0.01  # seconds before another try
_CREDENTIALS = struct.Struct("=iii")  # process, user, group
_TOO_MANY = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass
class _Handshake:
    """One that is under way: as acceptor, or as initiator of the connection to the process with a number."""

    side: Acceptance | Initiation
    number: int
    expires: float
    is_stranger: bool = False
    received: bytearray = field(default_factory=bytearray)


class LocalListener:
    """Listens for other processes of this machine, and connects to their listeners.

    Attributes:
        address: what the others must know, and nobody else: it has the key.
    """

    def __init__(self) -> None:
        """Listen with a new name."""
        name, self._key = f"paceline-{secrets.token_hex(16)}", secrets.token_bytes(32)
        self.address = json.dumps([name, self._key.hex()])
        self._links: dict[int, socket.socket] = {}
        self._expected: set[int] = set()
        self._handshakes: dict[socket.socket, _Handshake] = {}  # the oldest first
        self._server = socket.socket(socket.AF_UNIX)
        try:
            self._server.setblocking(False)
            self._server.bind(f"\0{name}")
            self._server.listen(_BACKLOG)
        except BaseException:
            self._server.close()
            raise

    def close(self) -> None:
        """Listen no longer, and drop all that is under way; the connections that `connect` has returned stay."""
        for sock in [self._server, *self._handshakes]:
            sock.close()
        self._handshakes.clear()

    def connect(self, own: int, addresses: Mapping[int, str], expected: Collection[int]) -> dict[int, socket.socket]:
        """Connect to `addresses`, and wait for `expected` to connect; all of them must do so at the same time."""
        self._expected = set(expected)
        until = time.monotonic() + SECONDS
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._server, selectors.EVENT_READ)
                while len(self._links) < len(addresses) + len(expected):
                    now = time.monotonic()
                    if now > until:
                        raise TimeoutError(f"another rank did not connect within {SECONDS:g} s")
                    for sock in [sock for sock, each in self._handshakes.items() if each.expires < now]:
                        self._drop(selector, sock)
                    is_complete = self._initiate(selector, own, addresses, until)
                    expiries = [each.expires for each in self._handshakes.values()]
                    wait = min([until, *expiries]) - now if is_complete else _PAUSE
                    for key, _ in selector.select(max(0.0, wait)):
                        assert isinstance(key.fileobj, socket.socket)
                        if key.fileobj is self._server:
                            self._accept(selector, until)
                        elif key.fileobj in self._handshakes:
                            self._advance(selector, key.fileobj)
        except BaseException:
            for sock in self._links.values():
                sock.close()
            raise
        return self._links

    def _initiate(self, selector: selectors.BaseSelector, own: int, addresses: Mapping[int, str], until: float) -> bool:
        """Begin the handshakes that this side begins; returns whether none is left to begin."""
        begun = {each.number for each in self._handshakes.values() if isinstance(each.side, Initiation)}
        is_complete = True
        for number, address in addresses.items():
            if number in self._links or number in begun:
                continue
            name, key = json.loads(address)
            initiation = Initiation(bytes.fromhex(key), own)
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.setblocking(False)
                sock.connect(f"\0{name}")
                sock.send(initiation.hello)
            except (BlockingIOError, BrokenPipeError, ConnectionResetError):  # no room there
                sock.close()
                is_complete = False
                continue
            except BaseException:
                sock.close()
                raise
            self._begin(selector, sock, _Handshake(initiation, number, until))
        return is_complete

    def _accept(self, selector: selectors.BaseSelector, until: float) -> None:
        for _ in range(_BATCH):
            try:
                sock, _ = self._server.accept()
            except (BlockingIOError, ConnectionError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in _TOO_MANY or not self._drop_oldest(selector, True, 0):
                    raise
                continue
            sock.setblocking(False)
            is_stranger = _user(sock) != os.geteuid()  # or a rank in another user namespace
            self._drop_oldest(selector, is_stranger, _MOST_STRANGERS if is_stranger else _MOST + len(self._expected))
            expires = min(until, time.monotonic() + _STRANGER_SECONDS) if is_stranger else until
            acceptance = Acceptance(self._key, lambda number: number in self._expected - self._links.keys())
            self._begin(selector, sock, _Handshake(acceptance, -1, expires, is_stranger))

    def _advance(self, selector: selectors.BaseSelector, sock: socket.socket) -> None:
        """Go on with a handshake as far as it has come."""
        handshake = self._handshakes[sock]
        side = handshake.side
        try:
            data = sock.recv(side.needs - len(handshake.received))
            handshake.received += data
            if data and len(handshake.received) < side.needs:
                return
            answer = side.receive(bytes(handshake.received))
            handshake.received.clear()
            sock.sendall(answer)  # an empty buffer takes it whole
        except BlockingIOError:
            return
        except HandshakeError as error:
            self._drop(selector, sock)
            if data and isinstance(side, Initiation):
                raise PermissionError("another program listens at the address of a rank") from error
            return
        except OSError:
            self._drop(selector, sock)
            return
        if not side.needs:
            self._forget(selector, sock)
            self._links[side.number if isinstance(side, Acceptance) else handshake.number] = sock

    def _drop_oldest(self, selector: selectors.BaseSelector, are_strangers: bool, most: int) -> bool:
        """Drop the oldest accepted connections of strangers, or of others, if there are `most` or more."""
        accepted = [
            sock
            for sock, each in self._handshakes.items()
            if each.is_stranger == are_strangers and isinstance(each.side, Acceptance)
        ]
        dropped = accepted[: max(0, len(accepted) - most + 1)]
        for sock in dropped:
            self._drop(selector, sock)
        return bool(dropped)

    def _begin(self, selector: selectors.BaseSelector, sock: socket.socket, handshake: _Handshake) -> None:
        self._handshakes[sock] = handshake
        selector.register(sock, selectors.EVENT_READ)

    def _forget(self, selector: selectors.BaseSelector, sock: socket.socket) -> None:
        del self._handshakes[sock]
        selector.unregister(sock)

    def _drop(self, selector: selectors.BaseSelector, sock: socket.socket) -> None:
        self._forget(selector, sock)
        sock.close()


def _user(sock: socket.socket) -> int:
    """The user of the process at the other side."""
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)
