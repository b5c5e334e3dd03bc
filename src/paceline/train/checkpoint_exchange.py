"""How the ranks agree on a checkpoint, apart from everything the training sends.

A star of TCP connections: all ranks talk to rank 0, which so sees at once when one ends, and tells the others. Why no
process group of torch does this: two threads that use one group deadlock (KempnerForge#104), a collective in a group of
its own leaves the ranks hanging that do not talk to the dead one, and gloo forgets a send whose peer ends in the same
instant: one kill in 130 left rank 0 waiting for the timeout of the group (torch 2.13).
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch.distributed as dist

from paceline.train.checkpoint_files import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_OK, _FAILED, _LOST = b"+", b"-", b"!"
_SIZE = struct.Struct("!Q")
_HELLO = struct.Struct("!32sI")  # the token, and the rank that connects
_CONNECT = 5.0  # seconds to try one address, and for a stranger to say hello
_MEET = 300.0  # seconds until all ranks must have connected


class ExchangeError(CheckpointError):
    """A rank ended, or did not answer in time, while the ranks agreed on a checkpoint."""


class Exchange(Protocol):
    """What a checkpoint store needs from the other ranks. Used by one thread at a time, on all ranks alike."""

    def decide(self, data: bytes, rule: Callable[[list[bytes]], bytes]) -> bytes:
        """Hand every rank's `data`, in the order of ranks, to `rule` on rank 0; return its answer on every rank.

        `rule` is called on rank 0 alone.

        Raises:
            ExchangeError: a rank ended or does not answer; raised on every rank that is left.
            CheckpointError: `rule` failed; the same on every rank.
        """
        ...


class SingleExchange:
    """The exchange of a training with one process."""

    def decide(self, data: bytes, rule: Callable[[list[bytes]], bytes]) -> bytes:
        """See `Exchange.decide`."""
        return rule([data])


class SocketExchange:
    """An exchange over TCP connections of its own, so that a background thread may use it while training runs.

    Made by all ranks at the same place in the script, with the default process group initialised: over it rank 0 tells
    where it listens. Once a rank is lost, every further call fails.

    Args:
        timeout: how long rank 0 waits for a rank that lives but does not come: longer than it may take to write a
            checkpoint.

    Raises:
        ExchangeError: some rank did not connect.
    """

    def __init__(self, timeout: timedelta = timedelta(minutes=30)) -> None:
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._timeout = timeout.total_seconds()
        self._peers: dict[int, socket.socket] = {}  # on rank 0 all others, elsewhere rank 0
        self._broken = ""
        _exchanges.add(self)
        try:
            self._meet()
            self.decide(b"", lambda _: b"")  # all are there
        except BaseException:
            self.close()  # so that nobody waits for this rank
            raise

    def decide(self, data: bytes, rule: Callable[[list[bytes]], bytes]) -> bytes:
        """See `Exchange.decide`."""
        if not self._broken:
            answer = self._lead(data, rule) if self._rank == 0 else self._follow(data)
            if answer[:1] == _OK:
                return answer[1:]
            if answer[:1] == _FAILED:
                raise CheckpointError(answer[1:].decode())
            self._broken = answer[1:].decode()
        raise ExchangeError(self._broken)

    def close(self) -> None:
        """End the connections."""
        self._broken = self._broken or "the exchange of the checkpoints is closed"
        for peer in self._peers.values():
            peer.close()

    def _meet(self) -> None:
        if self._rank == 0:
            with _listen() as server:
                token = secrets.token_hex(16)
                dist.broadcast_object_list([(server.getsockname()[1], _addresses(), token)], src=0)
                self._accept(server, token.encode())
        else:
            offer = [None]
            dist.broadcast_object_list(offer, src=0)
            self._connect(*offer[0])  # type: ignore[misc]  # the list is filled now

    def _lead(self, data: bytes, rule: Callable[[list[bytes]], bytes]) -> bytes:
        received, lost = self._collect()
        if lost:
            answer = _LOST + f"{lost} while the ranks agreed on a checkpoint".encode()
        else:
            try:
                answer = _OK + rule([data, *(received[rank] for rank in range(1, self._world_size))])
            except Exception as error:  # whatever it is, the others wait for an answer
                answer = _FAILED + f"{error}".encode()
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # it ended after its vote: the next round finds it gone
                _send(peer, answer)
        return answer

    def _collect(self) -> tuple[dict[int, bytes], str]:
        """What every other rank sent; or which one is lost, and how."""
        received: dict[int, bytes] = {}
        deadline = time.monotonic() + self._timeout
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = min(key.data for key in selector.get_map().values())
                    return {}, f"rank {late} did not answer within {self._timeout:.0f} s"
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    try:
                        received[key.data] = _receive(self._peers[key.data])
                    except OSError:
                        return {}, f"rank {key.data} ended"
        return received, ""

    def _follow(self, data: bytes) -> bytes:
        try:
            return _ask(self._peers[0], data)
        except TimeoutError:
            lost = f"rank 0 did not answer within {2 * self._timeout:.0f} s"
        except OSError:
            lost = "rank 0 ended"
        return _LOST + f"{lost} while the ranks agreed on a checkpoint".encode()

    def _accept(self, server: socket.socket, token: bytes) -> None:
        deadline = time.monotonic() + _MEET
        while len(self._peers) < self._world_size - 1:
            server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                peer, _ = server.accept()
            except TimeoutError:
                missing = sorted({*range(1, self._world_size)} - self._peers.keys())
                raise ExchangeError(f"ranks {missing} did not connect to rank 0 within {_MEET:.0f} s") from None
            try:
                peer.settimeout(_CONNECT)
                said, rank = _HELLO.unpack(_read(peer, _HELLO.size))
                if not hmac.compare_digest(said, token):
                    raise ConnectionError("a stranger")
                peer.sendall(token)
            except OSError:
                peer.close()
            else:
                self._peers[rank] = _prepared(peer, self._timeout)

    def _connect(self, port: int, addresses: list[str], token: str) -> None:
        for address in addresses:
            try:
                peer = socket.create_connection((address, port), _CONNECT)
            except OSError:
                continue
            try:
                peer.sendall(_HELLO.pack(token.encode(), self._rank))
                if hmac.compare_digest(_read(peer, len(token)), token.encode()):
                    # Waits longer than rank 0, so that it is rank 0 who says which rank did not come.
                    self._peers[0] = _prepared(peer, 2 * self._timeout)
                    return
            except OSError:
                pass
            peer.close()
        raise ExchangeError(
            f"rank {self._rank} on {socket.gethostname()} cannot connect to rank 0, "
            f"port {port} at {', '.join(addresses)}"
        )


_exchanges: weakref.WeakSet[SocketExchange] = weakref.WeakSet()


def _close_in_child() -> None:
    """Forked workers must not keep a connection alive when their rank dies."""
    for exchange in _exchanges:
        exchange.close()


os.register_at_fork(after_in_child=_close_in_child)


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _addresses() -> list[str]:
    """Where this machine may be reached, the likeliest first; who connects sees by the token whether it is."""
    found = [os.environ.get("MASTER_ADDR", ""), socket.gethostname()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route, contextlib.suppress(OSError):
        route.connect(("192.0.2.1", 9))  # sends nothing; tells which address of ours leads outside
        found.append(route.getsockname()[0])
    return list(dict.fromkeys(address for address in [*found, "127.0.0.1", "::1"] if address))


def _prepared(peer: socket.socket, timeout: float) -> socket.socket:
    """A connection that notices within half a minute when the other machine is gone."""
    peer.settimeout(timeout)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 25_000)):
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return peer


def _send(peer: socket.socket, data: bytes) -> None:
    peer.sendall(_SIZE.pack(len(data)) + data)


def _ask(peer: socket.socket, data: bytes) -> bytes:
    """Send, and receive the answer; or what came unasked, since then nobody reads what is sent."""
    rest = memoryview(_SIZE.pack(len(data)) + data)
    with selectors.DefaultSelector() as selector:
        selector.register(peer, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while rest:
            events = selector.select(peer.gettimeout())
            if not events:
                raise TimeoutError
            if events[0][1] & selectors.EVENT_READ:
                break
            rest = rest[peer.send(rest) :]
    return _receive(peer)


def _receive(peer: socket.socket) -> bytes:
    (size,) = _SIZE.unpack(_read(peer, _SIZE.size))
    return _read(peer, size)


def _read(peer: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = peer.recv_into(view)
        if not count:
            raise ConnectionError("the other side ended")
        view = view[count:]
    return bytes(data)


class Agreement:
    """Work that is done by all ranks or by none."""

    def __init__(self, exchange: Exchange, rank: int, world_size: int) -> None:
        self.decide = exchange.decide
        self.who = f"rank {rank} on {socket.gethostname()} " if world_size > 1 else ""

    def together(self, failed: str, work: Callable[[], T]) -> T:
        """Do this rank's part; `failed` begins the error, such as "cannot save".

        Raises:
            CheckpointError: it failed on some rank; one line, the same on all ranks.
        """
        cause: Exception | None = None
        vote = ""
        try:
            result = work()
        except Exception as error:
            cause = error
            reason = error.strerror if isinstance(error, OSError) else str(error).strip()
            vote = f"{self.who}{failed}: {(reason or type(error).__name__).splitlines()[0]}"
        try:
            self.decide(vote.encode(), _first_failure)
        except CheckpointError as verdict:
            raise verdict from cause
        return result


def _first_failure(votes: list[bytes]) -> bytes:
    for vote in votes:
        if vote:
            raise CheckpointError(vote.decode())
    return b""
