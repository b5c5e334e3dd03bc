"""Whether hosts reach each other, and how fast: each listens on a free port for a while, and the others connect to it.

Both sides of a connection prove that they know the token of this preflight, and the listening one that it is the host
that was meant (`meeting.prove`); nobody else is answered. Messages are JSON lines, one question, one answer.
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
from paceline.node.machine.network import listen
from paceline.node.rendezvous.handshake import is_proof, prove

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CONNECT_SECONDS = 4.0  # a lost packet is sent again after one second, and after three
ANSWER_SECONDS = 30.0  # the kernel alone makes a connection; who answers on it may wait for a busy processor
_MOST_STRANGERS = 512  # more than hosts that connect at the same time
_LONGEST_LINE = 4096
_ROUNDS = 21
_SENDING_SECONDS = 0.5
_STARTING_SECONDS = 0.1  # in which TCP has not found its pace yet
_UNSENT = 128 * 1024  # bytes that the kernel holds back, at most: a slow connection is to be done soon
_TCP_NOTSENT_LOWAT = 25  # Linux; Python names it from 3.12 on


class Impostor(ConnectionError):
    """Who answers is not the host that was meant."""


@dataclass(frozen=True)
class Peer:
    """Another host of the preflight, and where it listens."""

    name: str
    address: str
    port: int


class Post:
    """Where the others reach this host."""

    def __init__(self, token: bytes, name: str) -> None:
        self._token, self._name = token, name
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        self._listener = listen(backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more."""
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
                if len(self._strangers) >= _MOST_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # which wakes its thread
                self._strangers[sock] = None
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, ValueError, KeyError):
            try:
                self._let_in(sock)
            finally:
                with self._lock:
                    self._strangers.pop(sock, None)
            while _hear(sock)["do"] == "echo":
                _tell(sock, {})
            _tell(sock, {})
            _tell(sock, {"bandwidth": _take(sock)})
            while sock.recv(1 << 20):  # what was on its way
                pass

    def _let_in(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours, theirs = handshake.nonce().hex(), _hear(sock)["challenge"]
        _tell(sock, {"challenge": ours, "proof": prove(self._token, f"host {self._name}", theirs, ours)})
        if not is_proof(_hear(sock)["proof"], self._token, "guest", theirs, ours):
            raise Impostor("wrong token")
        _tell(sock, {})


def connect(peer: Peer, token: bytes) -> socket.socket:
    """A connection to another host.

    Raises:
        OSError: it cannot be reached, or somebody else answers there.
    """
    sock = socket.create_connection((peer.address, peer.port), timeout=CONNECT_SECONDS)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = handshake.nonce().hex()
        _tell(sock, {"challenge": mine})
        answer = _hear(sock)
        theirs = answer.get("challenge")
        if not is_proof(answer.get("proof"), token, f"host {peer.name}", mine, theirs):
            raise Impostor("another machine answers there")
        _tell(sock, {"proof": prove(token, "guest", mine, theirs)})
        _hear(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def reach(peers: Sequence[Peer], token: bytes) -> dict[str, str | None]:
    """Why each of these cannot be reached from here, None where it can; all are tried at once."""

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
                _tell(sock, {"do": "echo"})
                _hear(sock)
                taken.append(time.monotonic() - start)
    except OSError as error:
        return {"problem": _reason(error)}
    return {"seconds": statistics.median(taken)}


def bandwidth(peer: Peer, token: bytes) -> dict[str, Any]:
    """How fast the other host gets bytes over one connection: `bandwidth` in bytes a second, or the `problem`."""
    try:
        with connect(peer, token) as sock:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT)
            _tell(sock, {"do": "take"})
            _hear(sock)
            return dict(_send(sock))
    except OSError as error:
        return {"problem": _reason(error)}


def _send(sock: socket.socket) -> Mapping[str, Any]:
    """Send until the other side says that it has enough, and how fast it was."""
    data, deadline = bytes(_UNSENT), time.monotonic() + ANSWER_SECONDS
    sock.setblocking(False)
    while (left := deadline - time.monotonic()) > 0:
        readable, writable, _ = select.select([sock], [sock], [], left)
        if readable:
            return _hear(sock)
        if writable:
            with contextlib.suppress(BlockingIOError):
                sock.send(data)
    raise TimeoutError("timed out")


def _take(sock: socket.socket) -> float:
    """How many bytes a second come; those of the beginning are not counted."""
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


def _tell(sock: socket.socket, message: Mapping[str, Any]) -> None:
    sock.settimeout(ANSWER_SECONDS)
    sock.sendall(json.dumps(message).encode() + b"\n")


def _hear(sock: socket.socket) -> dict[str, Any]:
    """The next message.

    Raises:
        OSError: none comes in time, or what comes is none.
    """
    deadline, line = time.monotonic() + ANSWER_SECONDS, b""
    while not line.endswith(b"\n"):
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            data = sock.recv(_LONGEST_LINE)
        except socket.timeout:
            raise TimeoutError(f"connected, but nothing answered for {ANSWER_SECONDS:g} s") from None
        line += data
        if not data:
            raise Impostor("whoever answers there does not know this preflight's token")
        if len(line) > _LONGEST_LINE:
            raise Impostor("another program answers there")
    try:
        message: dict[str, Any] = json.loads(line)
        message.keys()
    except (ValueError, AttributeError, RecursionError):
        raise Impostor("another program answers there") from None
    return message


def _reason(error: OSError) -> str:
    return (error.strerror or str(error) or "no answer").lower()
