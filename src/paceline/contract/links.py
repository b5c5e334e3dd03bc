"""Connections whose two sides have proved to each other that they know a key, over IPv4, IPv6 and local sockets.

The one place where agents and ranks listen, shake hands (`handshake`), and divide a stream into messages.
"""

from __future__ import annotations

import errno
import selectors
import socket
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

from .handshake import CHECKSUM_SIZE, Acceptance, HandshakeError, Initiation, checksums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HANDSHAKE = 20.0  # seconds for one handshake
MOST_PENDING = 256  # unauthenticated connections at a time, beside one of each that is expected
_BATCH = 64  # connections that are taken before something else is done
_NO_FILES = 0.1  # seconds to wait when the process may open no more files
_SIZE = struct.Struct("!Q")
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Link(NamedTuple):
    """A connection, and the key that only its two sides know."""

    socket: socket.socket
    key: bytes


def listen(port: int = 0, address: str = "", backlog: int = 1024) -> socket.socket:
    """A socket that listens on a port, or on a free one for 0; without an address on all of this machine."""
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", port), backlog=backlog)


class _Pending:
    """A handshake that is under way."""

    def __init__(self, acceptance: Acceptance) -> None:
        self.acceptance, self.received, self.expires = acceptance, bytearray(), time.monotonic() + HANDSHAKE


class Acceptor:
    """Takes the connections to a listening socket whose other side knows a key, many handshakes at a time.

    An unauthenticated peer that is silent or slow delays nobody. There is a bounded number of them: when more connect,
    the oldest is dropped, and a peer that was dropped tries again.
    """

    def __init__(self, server: socket.socket, key: bytes, accepts: Callable[[int], bool], expected: int) -> None:
        """Nobody has connected yet."""
        self._server = server
        self._key = key
        self._accepts = accepts
        self._most = expected + MOST_PENDING
        self._pending: dict[socket.socket, _Pending] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def accept(self, timeout: float | None = None) -> Iterator[tuple[int, Link]]:
        """The peers that have proved themselves by now: their numbers and connections; waits for some event."""
        now = time.monotonic()
        limits = [] if timeout is None else [timeout]
        limits.extend(pending.expires - now for pending in list(self._pending.values())[:1])
        for key, _ in self._selector.select(max(0.0, min(limits)) if limits else None):
            assert isinstance(key.fileobj, socket.socket)
            if key.fileobj is self._server:
                self._take_connections()
            elif key.fileobj in self._pending:
                link = self._advance(key.fileobj)
                if link is not None:
                    yield link
        now = time.monotonic()
        for sock, pending in list(self._pending.items()):
            if pending.expires > now:
                break
            self._drop(sock)

    def close(self) -> None:
        """Drop the peers that have not proved themselves."""
        for sock in list(self._pending):
            self._drop(sock)
        self._selector.close()

    def _take_connections(self) -> None:
        for _ in range(_BATCH):
            try:
                sock, _ = self._server.accept()
            except (BlockingIOError, ConnectionError, InterruptedError):
                return  # there are no more, or it is gone again
            except OSError as error:
                if error.errno not in _TOO_MANY_FILES:
                    raise
                if self._pending:
                    self._drop(next(iter(self._pending)))
                time.sleep(_NO_FILES)
                return
            if len(self._pending) >= self._most:
                self._drop(next(iter(self._pending)))
            sock.setblocking(False)
            self._pending[sock] = _Pending(Acceptance(self._key, self._accepts))
            self._selector.register(sock, selectors.EVENT_READ)

    def _advance(self, sock: socket.socket) -> tuple[int, Link] | None:
        """Go on with a handshake as far as it has come."""
        pending = self._pending[sock]
        acceptance = pending.acceptance
        try:
            data = sock.recv(acceptance.needs - len(pending.received))
            pending.received += data
            if not data:
                self._drop(sock)
            elif len(pending.received) == acceptance.needs:
                answer = acceptance.receive(bytes(pending.received))
                pending.received.clear()
                if sock.send(answer) != len(answer):  # an empty buffer takes it whole
                    self._drop(sock)
                elif not acceptance.needs:
                    self._forget(sock)
                    return acceptance.number, Link(_prepared(sock), acceptance.session_key)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(sock)
        return None

    def _forget(self, sock: socket.socket) -> None:
        del self._pending[sock]
        self._selector.unregister(sock)

    def _drop(self, sock: socket.socket) -> None:
        self._forget(sock)
        sock.close()


def initiate(sock: socket.socket, key: bytes, number: int, seconds: float = HANDSHAKE) -> Link:
    """Prove to the other side that we know the key, once it has proved it; `number` says who we are."""
    initiation, deadline = Initiation(key, number), time.monotonic() + seconds
    sock.settimeout(max(0.001, seconds))
    sock.sendall(initiation.hello)
    while initiation.needs:
        sock.sendall(initiation.receive(read(sock, initiation.needs, deadline)))
    return Link(_prepared(sock), initiation.session_key)


class Messages:
    """Messages over a link. That one was changed, left out, repeated or reflected on the way is noticed."""

    def __init__(self, link: Link, *, accepted: bool) -> None:
        """No message has been sent yet."""
        self.socket = link.socket
        self._ours, self._theirs = checksums(link.key, accepted=accepted)
        self._incoming = bytearray()  # the beginning of a message, see `feed`
        self._size: int | None = None  # of that message, once it has been proved

    def pack(self, data: bytes) -> bytes:
        """The bytes of the next message; they must be sent before those of another one."""
        size = _SIZE.pack(len(data))
        packed = b"".join([size, self._ours.of(size), data, self._ours.of(size + data)])
        self._ours.next()
        return packed

    def send(self, data: bytes) -> None:
        """Send a message."""
        self.socket.sendall(self.pack(data))

    def receive(self) -> bytes:
        """The next message. No memory is taken for one before its size has been proved to be the other side's."""
        size = read(self.socket, _SIZE.size)
        self._check(read(self.socket, CHECKSUM_SIZE), size)
        data = read(self.socket, _SIZE.unpack(size)[0])
        self._check(read(self.socket, CHECKSUM_SIZE), size + data)
        self._theirs.next()
        return data

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete with these bytes from the socket, for a reader that must not wait.

        A connection is read either with this or with `receive`.
        """
        self._incoming += data
        while True:
            head = _SIZE.size + CHECKSUM_SIZE
            if self._size is None:
                if len(self._incoming) < head:
                    return
                size = bytes(self._incoming[: _SIZE.size])
                self._check(self._incoming[_SIZE.size : head], size)
                (self._size,) = _SIZE.unpack(size)
            end = head + self._size
            if len(self._incoming) < end + CHECKSUM_SIZE:
                return
            message = bytes(self._incoming[head:end])
            size = bytes(self._incoming[: _SIZE.size])
            self._check(self._incoming[end : end + CHECKSUM_SIZE], size + message)
            del self._incoming[: end + CHECKSUM_SIZE]
            self._size = None
            self._theirs.next()
            yield message

    def _check(self, given: bytes | bytearray, what: bytes) -> None:
        if not self._theirs.is_right(given, what):
            raise HandshakeError("what came is not what the other side has sent")


def read(peer: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Exactly `size` bytes."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if deadline is not None:
            peer.settimeout(max(0.001, deadline - time.monotonic()))
        count = peer.recv_into(view)
        if not count:
            raise ConnectionError("the other side ended the connection")
        view = view[count:]
    return bytes(data)


def _prepared(peer: socket.socket) -> socket.socket:
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 25_000)):
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return peer
