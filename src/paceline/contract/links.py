"""Connections whose two sides have proved to each other that they know a key, over IPv4, IPv6 and local sockets.

The one place where agents and ranks listen, shake hands (`handshake`), and divide a stream into messages.
"""

from __future__ import annotations

import errno
import itertools
import os
import selectors
import socket
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

from .handshake import Acceptance, HandshakeError, Initiation, checksums
from .local_sockets import peer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HANDSHAKE = 20.0  # seconds for one handshake
MOST_PENDING = 256  # unauthenticated connections at a time, beside one of each that is expected
_STRANGER = 5.0  # seconds for one with a process of another user of this machine
_MOST_STRANGERS = 64  # of these at a time
_BATCH = 64  # connections that are taken before something else is done
_NO_FILES = 0.1  # seconds to wait when the process may open no more files
_SIZE = struct.Struct("!Q")
_CHUNK = 1 << 16  # bytes read at once; more would be new memory each time
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Link(NamedTuple):
    """A connection, and the key that only its two sides know; None if a process has inherited it from the other one."""

    socket: socket.socket
    key: bytes | None


def listen(port: int = 0, address: str = "", backlog: int = 1024) -> socket.socket:
    """A socket that listens on a port, or on a free one for 0; without an address on all of this machine."""
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", port), backlog=backlog)


def listen_here(name: str, backlog: int = 4096) -> socket.socket:
    """A local socket that listens with an abstract name: every user of the machine can see it and connect to it."""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(f"\0{name}")
        server.listen(backlog)  # the kernel may allow fewer
    except BaseException:
        server.close()
        raise
    return server


class _Handshake:
    """One that is under way: as acceptor, or as initiator of the connection to the peer with a number."""

    def __init__(self, side: Acceptance | Initiation, group: _Group, seconds: float, number: int = -1) -> None:
        self.side, self.group, self.number = side, group, number
        self.expires = time.monotonic() + seconds
        self.received = bytearray()


_Group = dict[socket.socket, _Handshake]  # those of one kind; the oldest first


class Acceptor:
    """Takes the connections to a listening socket whose other side knows a key, many handshakes at a time.

    An unauthenticated peer that is silent or slow delays nobody. There is a bounded number of them: when more connect,
    the oldest is dropped, and a peer that was dropped tries again. Of processes of other users of this machine there
    are fewer, and for less time.

    Attributes:
        server: the socket that listens; `close` leaves it open.
    """

    def __init__(self, server: socket.socket, key: bytes, accepts: Callable[[int], bool], expected: int) -> None:
        """Nobody has connected yet."""
        self.server = server
        self._key = key
        self._accepts = accepts
        self._most = expected + MOST_PENDING
        self._accepted: _Group = {}
        self._strangers: _Group = {}
        self._begun: _Group = {}
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def fileno(self) -> int:
        """The descriptor that is readable when `accept` has something to do."""
        return self._selector.fileno()

    @property
    def begun(self) -> set[int]:
        """The peers to which this side has begun to connect."""
        return {each.number for each in self._begun.values()}

    def begin(self, sock: socket.socket, key: bytes, own: int, number: int) -> None:
        """Begin a handshake over a new connection to the peer with a number. `accept` has it once that is proved."""
        initiation = Initiation(key, own)
        sock.setblocking(False)
        sock.send(initiation.hello)
        self._watch(sock, _Handshake(initiation, self._begun, HANDSHAKE, number))

    def accept(self, timeout: float | None = None) -> Iterator[tuple[int, Link]]:
        """The peers that have proved themselves by now: their numbers and connections; waits for some event.

        That a peer to which this side connects does not know the key is a `HandshakeError`.
        """
        groups = (self._accepted, self._strangers, self._begun)
        oldest = [each.expires - time.monotonic() for group in groups for each in itertools.islice(group.values(), 1)]
        limits = oldest if timeout is None else [*oldest, timeout]
        for key, _ in self._selector.select(max(0.0, min(limits)) if limits else None):
            assert isinstance(key.fileobj, socket.socket)
            if key.data is None:
                self._take_connections()
            elif key.fileobj in key.data.group:
                link = self._advance(key.fileobj, key.data)
                if link is not None:
                    yield link
        now = time.monotonic()
        for group in groups:
            while group and next(iter(group.values())).expires <= now:
                self._drop_oldest(group)

    def close(self) -> None:
        """Drop the peers that have not proved themselves."""
        for group in (self._accepted, self._strangers, self._begun):
            while group:
                self._drop_oldest(group)
        self._selector.close()

    def _take_connections(self) -> None:
        for _ in range(_BATCH):
            try:
                sock, _ = self.server.accept()
            except (BlockingIOError, ConnectionError, InterruptedError):
                return  # there are no more, or it is gone again
            except OSError as error:
                if error.errno not in _TOO_MANY_FILES:
                    raise
                if self._strangers:
                    self._drop_oldest(self._strangers)
                    continue
                if self._accepted:
                    self._drop_oldest(self._accepted)
                time.sleep(_NO_FILES)
                return
            sock.setblocking(False)
            group, most, seconds = self._accepted, self._most, HANDSHAKE
            if (
                sock.family == socket.AF_UNIX and peer_of(sock)[1] != os.geteuid()
            ):  # or a rank in another user namespace
                group, most, seconds = self._strangers, _MOST_STRANGERS, _STRANGER
            if len(group) >= most:
                self._drop_oldest(group)
            self._watch(sock, _Handshake(Acceptance(self._key, self._accepts), group, seconds))

    def _advance(self, sock: socket.socket, pending: _Handshake) -> tuple[int, Link] | None:
        """Go on with a handshake as far as it has come."""
        side = pending.side
        try:
            data = sock.recv(side.needs - len(pending.received))
            pending.received += data
            if not data:
                self._drop(sock, pending.group)
            elif len(pending.received) == side.needs:
                answer = side.receive(bytes(pending.received))
                pending.received.clear()
                if sock.send(answer) != len(answer):  # an empty buffer takes it whole
                    self._drop(sock, pending.group)
                elif not side.needs:
                    self._forget(sock, pending.group)
                    sock.settimeout(None)
                    number = side.number if isinstance(side, Acceptance) else pending.number
                    return number, Link(sock, side.session_key)
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(sock, pending.group)
            if isinstance(error, HandshakeError) and isinstance(side, Initiation):
                raise
        return None

    def _watch(self, sock: socket.socket, handshake: _Handshake) -> None:
        handshake.group[sock] = handshake
        self._selector.register(sock, selectors.EVENT_READ, handshake)

    def _forget(self, sock: socket.socket, group: _Group) -> None:
        del group[sock]
        self._selector.unregister(sock)

    def _drop(self, sock: socket.socket, group: _Group) -> None:
        self._forget(sock, group)
        sock.close()

    def _drop_oldest(self, group: _Group) -> None:
        self._drop(next(iter(group)), group)


def initiate(sock: socket.socket, key: bytes, number: int, seconds: float = HANDSHAKE) -> Link:
    """Prove to the other side that we know the key, once it has proved it; `number` says who we are."""
    initiation, deadline = Initiation(key, number), time.monotonic() + seconds
    sock.settimeout(max(0.001, seconds))
    sock.sendall(initiation.hello)
    try:
        while initiation.needs:
            sock.sendall(initiation.receive(read(sock, initiation.needs, deadline)))
    except socket.timeout:
        raise TimeoutError("no answer") from None
    sock.settimeout(None)
    return Link(sock, initiation.session_key)


class Messages:
    """Messages over a link. That one was changed, left out, repeated or reflected on the way is noticed."""

    def __init__(self, link: Link, *, accepted: bool) -> None:
        """No message has been sent yet."""
        self.socket = link.socket
        self._ours, self._theirs = checksums(link.key, accepted=accepted)
        self._head = _SIZE.size + self._theirs.size
        self._incoming = bytearray()  # the beginning of a message, see `feed`
        self._size: int | None = None  # of that message, once it has been proved

    def pack(self, data: bytes) -> bytes:
        """The bytes of the next message; they must be sent before those of another one."""
        size = _SIZE.pack(len(data))
        packed = b"".join([size, self._ours.of(size), data, self._ours.of(size, data)])
        self._ours.next()
        return packed

    def send(self, data: bytes) -> None:
        """Send a message."""
        self.socket.sendall(self.pack(data))

    def receive(self) -> bytes:
        """The next message. No memory is taken for one before its size has been proved to be the other side's."""
        size = read(self.socket, _SIZE.size)
        self._check(read(self.socket, self._theirs.size), size)
        data = read(self.socket, _SIZE.unpack(size)[0])
        self._check(read(self.socket, self._theirs.size), size, data)
        self._theirs.next()
        return data

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete with these bytes from the socket, for a reader that must not wait.

        A connection is read either with this or with `receive`.
        """
        self._incoming += data
        while True:
            head = self._head
            if self._size is None:
                if len(self._incoming) < head:
                    return
                size = self._incoming[: _SIZE.size]
                self._check(self._incoming[_SIZE.size : head], size)
                (self._size,) = _SIZE.unpack(size)
            end = head + self._size
            if len(self._incoming) < end + self._theirs.size:
                return
            with memoryview(self._incoming) as incoming:
                message = bytes(incoming[head:end])
            self._check(self._incoming[end : end + self._theirs.size], self._incoming[: _SIZE.size], message)
            del self._incoming[: end + self._theirs.size]
            self._size = None
            self._theirs.next()
            yield message

    def _check(self, given: bytes | bytearray, *parts: bytes | bytearray) -> None:
        if not self._theirs.is_right(given, *parts):
            raise HandshakeError("what came is not what the other side has sent")


class Stream:
    """Messages over a link that its owner never waits for: it calls `take` when it is readable, `flush` when writable.

    Attributes:
        socket: that of the link.
    """

    def __init__(self, link: Link, *, accepted: bool) -> None:
        """Nothing has been sent."""
        self.socket = link.socket
        self.socket.setblocking(False)
        self._messages = Messages(link, accepted=accepted)
        self._unsent = bytearray()

    def fileno(self) -> int:
        """The descriptor, so that a selector takes a stream as it is."""
        return self.socket.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether some bytes are still to be sent."""
        return bool(self._unsent)

    def put(self, data: bytes) -> None:
        """Queue a message, and send what the socket takes."""
        self._unsent += self._messages.pack(data)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self._unsent:
            try:
                sent = self.socket.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:sent]

    def take(self) -> list[bytes]:
        """The messages that have arrived completely; a `ConnectionResetError` if the other side has closed."""
        messages: list[bytes] = []
        while True:
            try:
                data = self.socket.recv(_CHUNK)
            except OSError as error:
                if messages or isinstance(error, BlockingIOError):
                    return messages  # the end of the connection is noticed again
                raise
            messages += self._messages.feed(data)
            if len(data) < _CHUNK:
                break
        if not data and not messages:
            raise ConnectionResetError("the other side closed the connection")
        return messages

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


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


def keep_alive(peer: socket.socket) -> None:
    """Have the kernel end a TCP connection within half a minute when the other machine is gone."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 25_000)):
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
