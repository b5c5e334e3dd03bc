"""Connections between ranks whose two sides have proved to each other that they know the job's key."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from paceline.contract.handshake import CHECKSUM_SIZE, Acceptance, HandshakeError, Initiation, checksums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .relay import Message

HANDSHAKE = 20.0  # seconds for one handshake
MOST_PENDING = 256  # unauthenticated connections at a time, beside one of each rank
_NO_FILES = 0.1  # seconds to wait when the process may open no more files
_SIZE = struct.Struct("!Q")
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True)
class Link:
    """A connection, and the key that only its two sides know."""

    socket: socket.socket
    key: bytes


@dataclass
class _Pending:
    acceptance: Acceptance
    expires: float
    received: bytearray = field(default_factory=bytearray)


class Acceptor:
    """Takes the connections to a listening socket whose other side knows a key, many handshakes at a time.

    An unauthenticated peer that is silent or slow delays nobody. There is a bounded number of them: when more connect,
    the oldest is dropped, and a rank that was dropped tries again.
    """

    def __init__(self, server: socket.socket, key: bytes, accepts: Callable[[int], bool], ranks: int) -> None:
        """Nobody has connected yet."""
        self._server = server
        self._key = key
        self._accepts = accepts
        self._most = ranks + MOST_PENDING
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
                self._take_connection()
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

    def _take_connection(self) -> None:
        try:
            sock, _ = self._server.accept()
        except (BlockingIOError, ConnectionError, InterruptedError):
            return  # it is gone again
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
        self._pending[sock] = _Pending(Acceptance(self._key, self._accepts), time.monotonic() + HANDSHAKE)
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


def initiate(sock: socket.socket, key: bytes, number: int) -> Link:
    """Prove to the other side that we know the key, once it has proved it; `number` says who we are."""
    initiation, deadline = Initiation(key, number), time.monotonic() + HANDSHAKE
    sock.settimeout(HANDSHAKE)
    sock.sendall(initiation.hello)
    while initiation.needs:
        data = b""
        while len(data) < initiation.needs:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            got = sock.recv(initiation.needs - len(data))
            if not got:
                raise ConnectionError("the other side ended the connection")
            data += got
        sock.sendall(initiation.receive(data))
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


class Sum:
    """A running keyed checksum of a stream of bytes, in one direction (keyed BLAKE2b, RFC 7693)."""

    SIZE = 32

    def __init__(self, link: Link) -> None:
        self._hash = hashlib.blake2b(key=link.key, digest_size=self.SIZE)

    def add(self, data: bytes | memoryview) -> None:
        """More of the stream."""
        self._hash.update(data)

    def digest(self) -> bytes:
        """The checksum of all that has been added so far."""
        return self._hash.digest()


def read(peer: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = peer.recv_into(view)
        if not count:
            raise ConnectionError("the other side ended")
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


# -- the thread that receives ------------------------------------------------------------------------------------------
# The thread of a rank that receives what other ranks send, and signals, while the main thread is in a collective.


class Events(Protocol):
    """What the thread reports; it calls these methods itself."""

    def received(self, rank: int, message: Message) -> None:
        """A message came from a rank."""

    def disconnected(self, rank: int, why: str) -> None:
        """The connection to a rank has ended, or can no longer be trusted."""

    def signalled(self, number: int) -> None:
        """This process got a signal."""

    def next_deadline(self) -> float | None:
        """When `deadline_passed` is to be called, on `time.monotonic`'s clock."""

    def deadline_passed(self) -> None:
        """The time of `next_deadline` has come."""


class Listener:
    """Reads from the links to other ranks until it is stopped.

    Attributes:
        wakeup: a byte written here wakes the thread; the number of a signal reports that signal, 0 reports nothing.
    """

    def __init__(self, events: Events, links: Mapping[int, Messages]) -> None:
        self._events, self._links = events, links
        self._woken, self.wakeup = socket.socketpair()
        for end in (self._woken, self.wakeup):
            end.setblocking(False)
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="paceline-watch", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; must not be called with a lock that its events take."""
        self._is_stopped = True
        self.wake()
        self._thread.join()

    def wake(self) -> None:
        """Make the thread ask for its next deadline again."""
        with contextlib.suppress(OSError):
            self.wakeup.send(b"\0")

    def close(self) -> None:
        """Close the sockets that wake the thread."""
        self._is_stopped = True
        self._woken.close()
        self.wakeup.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ, None)
            for rank, link in self._links.items():
                selector.register(link.socket, selectors.EVENT_READ, rank)
            while not self._is_stopped:
                deadline = self._events.next_deadline()
                ready = selector.select(None if deadline is None else max(0.0, deadline - time.monotonic()))
                if not ready and not self._is_stopped:
                    self._events.deadline_passed()
                for key, _ in ready:
                    if key.data is None:
                        self._read_signals()
                    elif not self._read(key.data):
                        selector.unregister(key.fileobj)

    def _read(self, rank: int) -> bool:
        """Read what came from a rank; returns whether more may come."""
        link = self._links[rank]
        try:
            data = link.socket.recv(65536)
        except OSError:
            data = b""
        try:
            for message in link.feed(data):
                self._events.received(rank, json.loads(message))
        except HandshakeError:
            self._events.disconnected(rank, "what came from it was changed on the way")
            return False
        if not data:
            self._events.disconnected(rank, "it is gone")
        return bool(data)

    def _read_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in self._woken.recv(4096):
                if number:
                    self._events.signalled(number)
