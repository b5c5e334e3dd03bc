"""Whether hosts reach each other, and how fast: each listens on a free port for a while, and the others connect to it.

Both sides of a connection prove that they know the token of this preflight, and the listening side also that it is the
expected host (`handshake.prove`); other peers get no answer. Messages are JSON lines, one answer per request.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.contract import handshake
from paceline.contract.links import listen
from paceline.node.rendezvous.handshake import is_proof, prove

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CONNECT_SECONDS = 4.0  # a lost packet is sent again after one second, and after three
ANSWER_SECONDS = 30.0  # the kernel makes a connection alone; the process that answers may wait for a busy processor
_MOST_PENDING = 2048  # unauthenticated connections: more than hosts that connect at the same time
_LONGEST_LINE = 4096
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
        self._token, self._name = token, name
        self._pending: dict[socket.socket, None] = {}  # not authenticated yet; the oldest first
        self._lock = threading.Lock()
        self._listener = listen()
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop to accept connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes `_accept`
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                if len(self._pending) >= _MOST_PENDING:
                    oldest = next(iter(self._pending))
                    del self._pending[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # which wakes its thread
                self._pending[sock] = None
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, ValueError, KeyError):
            try:
                self._authenticate(sock)
            finally:
                with self._lock:
                    self._pending.pop(sock, None)
            while _receive(sock)["do"] == "echo":
                _send_message(sock, {})
            _send_message(sock, {})
            _send_message(sock, {"bandwidth": _take(sock)})
            while sock.recv(1 << 20):  # what was sent before the answer arrived
                pass

    def _authenticate(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours, theirs = handshake.nonce().hex(), _receive(sock)["challenge"]
        _send_message(sock, {"challenge": ours, "proof": prove(self._token, f"host {self._name}", theirs, ours)})
        if not is_proof(_receive(sock)["proof"], self._token, "client", theirs, ours):
            raise WrongPeer("wrong token")
        _send_message(sock, {})


def connect(peer: Peer, token: bytes) -> socket.socket:
    """A connection to another host."""
    sock = socket.create_connection((peer.address, peer.port), timeout=CONNECT_SECONDS)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = handshake.nonce().hex()
        _send_message(sock, {"challenge": mine})
        answer = _receive(sock)
        theirs = answer.get("challenge")
        if not is_proof(answer.get("proof"), token, f"host {peer.name}", mine, theirs):
            raise WrongPeer("another machine answers there")
        _send_message(sock, {"proof": prove(token, "client", mine, theirs)})
        _receive(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def reach(peers: Sequence[Peer], token: bytes) -> dict[str, str | None]:
    """Why each of these cannot be reached from here, None if it can; all are tried in parallel."""

    def attempt(peer: Peer) -> str | None:
        try:
            connect(peer, token).close()
        except OSError as error:
            return _reason(error)
        return None

    if not peers:
        return {}
    with ThreadPoolExecutor(max_workers=len(peers)) as pool:
        return dict(zip((peer.name for peer in peers), pool.map(attempt, peers)))


def latency(peer: Peer, token: bytes) -> dict[str, Any]:
    """The median of some round trips of a small message: `seconds`, or the `problem`."""
    try:
        with connect(peer, token) as sock:
            taken = []
            for _ in range(_ROUNDS):
                start = time.monotonic()
                _send_message(sock, {"do": "echo"})
                _receive(sock)
                taken.append(time.monotonic() - start)
    except OSError as error:
        return {"problem": _reason(error)}
    return {"seconds": statistics.median(taken)}


def bandwidth(peer: Peer, token: bytes) -> dict[str, Any]:
    """The rate at which the other host receives over one connection: `bandwidth` in bytes/s, or the `problem`."""
    try:
        with connect(peer, token) as sock:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT)
            _send_message(sock, {"do": "take"})
            _receive(sock)
            return dict(_send(sock))
    except OSError as error:
        return {"problem": _reason(error)}


def _send(sock: socket.socket) -> Mapping[str, Any]:
    """Send until the other side answers with the rate."""
    data, deadline = bytes(_UNSENT), time.monotonic() + ANSWER_SECONDS
    sock.setblocking(False)
    poller = select.poll()  # `select` takes no descriptors above 1023
    poller.register(sock, select.POLLIN | select.POLLOUT)
    while (remaining := deadline - time.monotonic()) > 0:
        events = poller.poll(1000 * remaining)
        if events and events[0][1] & ~select.POLLOUT:
            return _receive(sock)
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


def _send_message(sock: socket.socket, message: Mapping[str, Any]) -> None:
    sock.settimeout(ANSWER_SECONDS)
    sock.sendall(json.dumps(message).encode() + b"\n")


def _receive(sock: socket.socket) -> dict[str, Any]:
    """The next message."""
    deadline, line = time.monotonic() + ANSWER_SECONDS, b""
    while not line.endswith(b"\n"):
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            data = sock.recv(_LONGEST_LINE)
        except socket.timeout:
            raise TimeoutError(f"connected, but nothing answered for {ANSWER_SECONDS:g} s") from None
        line += data
        if not data:
            raise WrongPeer("the program that answers there does not know this preflight's token")
        if len(line) > _LONGEST_LINE:
            raise WrongPeer("another program answers there")
    try:
        message: dict[str, Any] = json.loads(line)
        message.keys()
    except (ValueError, AttributeError, RecursionError):
        raise WrongPeer("another program answers there") from None
    return message


def _reason(error: OSError) -> str:
    return (error.strerror or str(error) or "no answer").lower()
