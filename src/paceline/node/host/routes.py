"""Whether hosts reach each other, and how fast: each listens on a free port for a while, and the others connect to it.

Both sides of a connection prove that they know the token of this preflight, and the listening side also that it is the
expected host (`contract/links`); other peers get no answer. There is one answer per request.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import statistics
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from paceline.contract.handshake import HandshakeError, WrongKey, derive_key
from paceline.contract.links import Acceptor, Link, Messages, initiate, listen
from paceline.node.readers import at_once

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.contract.facts import RouteFacts

    class _Message(RouteFacts, total=False):
        do: str  # "echo" or "take"; else it is an answer


CONNECT_SECONDS = 4.0  # a lost packet is sent again after one second, and after three
ANSWER_SECONDS = 30.0  # the kernel makes a connection alone; the process that answers may wait for a busy processor
_MOST_HOSTS = 2048  # that connect at the same time
_ROUNDS = 21
_SENDING_SECONDS = 0.5
_STARTING_SECONDS = 0.1  # in which TCP has not reached its full rate yet
_UNSENT = 128 * 1024  # most bytes that the kernel buffers, so that a slow connection ends soon
_TCP_NOTSENT_LOWAT = 25  # Linux; Python names it from 3.12 on


class WrongPeer(ConnectionError):
    """The other side is not the expected host."""


@dataclass(frozen=True)
class Peer:
    """Another host of the preflight, and where it listens."""

    name: str
    address: str
    port: int


class RouteListener:
    """Answers the other hosts of the preflight."""

    def __init__(self, token: bytes, name: str) -> None:
        self._acceptor = Acceptor(listen(), _key(token, name), lambda _: True, _MOST_HOSTS)
        self.port: int = self._acceptor.server.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop to accept connections."""
        with contextlib.suppress(OSError):
            self._acceptor.server.shutdown(socket.SHUT_RDWR)  # which wakes `_accept`
        self._thread.join()
        self._acceptor.server.close()

    def _accept(self) -> None:
        with contextlib.closing(self._acceptor), contextlib.suppress(OSError):  # it is closed
            while True:
                for _, link in self._acceptor.accept():
                    threading.Thread(target=_serve, args=(link,), daemon=True).start()


def _serve(link: Link) -> None:
    peer = Messages(link, accepted=True)
    with link.socket as sock, contextlib.suppress(OSError, ValueError, KeyError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while _receive(peer)["do"] == "echo":
            _send_message(peer, {})
        _send_message(peer, {})
        _send_message(peer, {"bandwidth": _take(sock)})
        while sock.recv(1 << 20):  # what was sent before the answer arrived
            pass


def _key(token: bytes, host: str) -> bytes:
    return derive_key(token, "host", host)


def connect(peer: Peer, token: bytes) -> Messages:
    """A connection to another host."""
    sock = socket.create_connection((peer.address, peer.port), timeout=CONNECT_SECONDS)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with _answering():
            return Messages(initiate(sock, _key(token, peer.name), 0, ANSWER_SECONDS), accepted=False)
    except BaseException as error:
        sock.close()
        if isinstance(error, HandshakeError):
            what = "machine" if isinstance(error, WrongKey) else "program"
            raise WrongPeer(f"another {what} answers there") from None
        if type(error) is ConnectionError:
            raise WrongPeer("the program that answers there does not know this preflight's token") from None
        raise


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except (socket.timeout, TimeoutError):
        raise TimeoutError(f"connected, but nothing answered for {ANSWER_SECONDS:g} s") from None


def reach(peers: Sequence[Peer], token: bytes) -> dict[str, str | None]:
    """Why each of these cannot be reached from here, None if it can; all are tried in parallel."""

    def attempt(peer: Peer) -> str | None:
        try:
            connect(peer, token).socket.close()
        except OSError as error:
            return _reason(error)
        return None

    return dict(zip((peer.name for peer in peers), at_once(attempt, peers, len(peers))))


def latency(peer: Peer, token: bytes) -> RouteFacts:
    """The median of some round trips of a small message: `seconds`, or the `problem`."""
    try:
        there = connect(peer, token)
        with there.socket:
            taken = []
            for _ in range(_ROUNDS):
                start = time.monotonic()
                _send_message(there, {"do": "echo"})
                _receive(there)
                taken.append(time.monotonic() - start)
    except OSError as error:
        return {"problem": _reason(error)}
    return {"seconds": statistics.median(taken)}


def bandwidth(peer: Peer, token: bytes) -> RouteFacts:
    """The rate at which the other host receives over one connection: `bandwidth` in bytes/s, or the `problem`."""
    try:
        there = connect(peer, token)
        with there.socket as sock:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT)
            _send_message(there, {"do": "take"})
            _receive(there)
            return _send(there)
    except OSError as error:
        return {"problem": _reason(error)}


def _send(there: Messages) -> RouteFacts:
    """Send until the other side answers with the rate."""
    sock = there.socket
    data, deadline = bytes(_UNSENT), time.monotonic() + ANSWER_SECONDS
    sock.setblocking(False)
    poller = select.poll()  # `select` takes no descriptors above 1023
    poller.register(sock, select.POLLIN | select.POLLOUT)
    while (remaining := deadline - time.monotonic()) > 0:
        events = poller.poll(1000 * remaining)
        if events and events[0][1] & ~select.POLLOUT:
            return _receive(there)
        if events:
            with contextlib.suppress(BlockingIOError):
                sock.send(data)
    raise TimeoutError("timed out")


def _take(sock: socket.socket) -> float:
    """Received bytes per second, without those of the beginning."""
    buffer = bytearray(1 << 20)
    begin = time.monotonic()
    start, end, count = begin + _STARTING_SECONDS, begin + _STARTING_SECONDS + _SENDING_SECONDS, 0
    while (now := time.monotonic()) < end:
        sock.settimeout(end - now)
        try:
            got = sock.recv_into(buffer)
        except socket.timeout:
            break
        if not got:
            raise ConnectionError("the other side closed the connection")
        if time.monotonic() >= start:
            count += got
    return count / _SENDING_SECONDS


def _send_message(peer: Messages, message: _Message) -> None:
    peer.socket.settimeout(ANSWER_SECONDS)
    peer.send(json.dumps(message).encode())


def _receive(peer: Messages) -> _Message:
    """The next message."""
    peer.socket.settimeout(ANSWER_SECONDS)
    with _answering():
        return cast("_Message", dict(json.loads(peer.receive())))


def _reason(error: OSError) -> str:
    return (error.strerror or str(error) or "no answer").lower()
