"""How the ranks agree on a checkpoint, apart from everything the training sends.

A star of TCP connections: all ranks talk to rank 0, which so sees at once when one ends, and tells the others. Why no
process group of torch does this: two threads that use one group deadlock (KempnerForge#104), a collective in a group of
its own leaves the ranks hanging that do not talk to the dead one, and gloo forgets a send whose peer ends in the same
instant: one kill in 130 left rank 0 waiting for the timeout of the group (torch 2.13).
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch.distributed as dist

from paceline.train.control import connect
from paceline.train.control.links import Messages
from paceline.train.group.join import on_one_machine, share_object

from .errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_OK, _FAILED, _LOST = b"+", b"-", b"!"


class ExchangeError(CheckpointError):
    """A rank ended, or did not answer in time, while the ranks agreed on a checkpoint."""


class Exchange(Protocol):
    """What a checkpoint store needs from the other ranks. Used by one thread at a time, on all ranks alike."""

    def decide(self, data: bytes, rule: Callable[[list[bytes]], bytes], within: float | None = None) -> bytes:
        """Hand every rank's `data`, in the order of ranks, to `rule` on rank 0; return its answer on every rank.

        `rule` is called on rank 0 alone. Where all ranks are known to come soon, `within` says in how many seconds.

        Raises:
            ExchangeError: a rank ended or does not answer; raised on every rank that is left.
            CheckpointError: `rule` failed; the same on every rank.
        """
        ...

    def addresses(self) -> list[str]:
        """Where the other ranks may reach this one, the likeliest first."""
        ...


class SingleExchange:
    """The exchange of a training with one process."""

    def decide(self, data: bytes, rule: Callable[[list[bytes]], bytes], within: float | None = None) -> bytes:
        """See `Exchange.decide`."""
        return rule([data])

    def addresses(self) -> list[str]:
        """See `Exchange.addresses`."""
        return []


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
        self._local = on_one_machine()
        self._peers: dict[int, Messages] = {}  # on rank 0 all others, elsewhere rank 0
        self._broken = ""
        _exchanges.add(self)
        try:
            self._meet()
            self.decide(b"", lambda _: b"")  # all are there
        except BaseException:
            self.close()  # so that nobody waits for this rank
            raise

    def decide(self, data: bytes, rule: Callable[[list[bytes]], bytes], within: float | None = None) -> bytes:
        """See `Exchange.decide`."""
        if not self._broken:
            limit = self._timeout if within is None else within
            answer = self._lead(data, rule, limit) if self._rank == 0 else self._follow(data, limit)
            if answer[:1] == _OK:
                return answer[1:]
            if answer[:1] == _FAILED:
                raise CheckpointError(answer[1:].decode())
            self._broken = answer[1:].decode()
        raise ExchangeError(self._broken)

    def addresses(self) -> list[str]:
        """See `Exchange.addresses`: this rank's end of its connection to rank 0."""
        is_first = self._rank == 0 or self._local
        return connect.addresses(local=self._local) if is_first else [self._peers[0].socket.getsockname()[0]]

    def close(self) -> None:
        """End the connections."""
        self._broken = self._broken or "the exchange of the checkpoints is closed"
        for peer in self._peers.values():
            peer.socket.close()

    def _meet(self) -> None:
        try:
            links = connect.connect(self._rank, self._world_size, share_object, "checkpoints", local=self._local)
        except connect.NotConnected as error:
            raise ExchangeError(str(error)) from error
        self._peers = {rank: Messages(link, accepted=self._rank == 0) for rank, link in links.items()}

    def _lead(self, data: bytes, rule: Callable[[list[bytes]], bytes], limit: float) -> bytes:
        for peer in self._peers.values():
            peer.socket.settimeout(limit)
        received, lost = self._collect(limit)
        if lost:
            answer = _LOST + f"{lost} while the ranks agreed on a checkpoint".encode()
        else:
            try:
                answer = _OK + rule([data, *(received[rank] for rank in range(1, self._world_size))])
            except Exception as error:  # whatever it is, the others wait for an answer
                answer = _FAILED + f"{error}".encode()
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # it ended after its vote: the next round finds it gone
                peer.send(answer)
        return answer

    def _collect(self, limit: float) -> tuple[dict[int, bytes], str]:
        """What every other rank sent; or which one is lost, and how."""
        received: dict[int, bytes] = {}
        deadline = time.monotonic() + limit
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                selector.register(peer.socket, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = min(key.data for key in selector.get_map().values())
                    return {}, f"rank {late} did not answer within {limit:.0f} s"
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    try:
                        received[key.data] = self._peers[key.data].receive()
                    except OSError as error:
                        return {}, _lost(key.data, error, limit)
        return received, ""

    def _follow(self, data: bytes, limit: float) -> bytes:
        limit *= 2  # longer than rank 0, so that it is rank 0 who says which rank did not come
        try:
            self._peers[0].socket.settimeout(limit)
            return _ask(self._peers[0], data)
        except OSError as error:
            return _LOST + f"{_lost(0, error, limit)} while the ranks agreed on a checkpoint".encode()


_exchanges: weakref.WeakSet[SocketExchange] = weakref.WeakSet()


def _close_in_child() -> None:
    """Forked workers must not keep a connection alive when their rank dies."""
    for exchange in _exchanges:
        exchange.close()


os.register_at_fork(after_in_child=_close_in_child)


def _lost(rank: int, error: OSError, limit: float) -> str:
    """What became of a rank; a machine that is gone is known by the errors of its connection."""
    if error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"rank {rank} cannot be reached"
    return (
        f"rank {rank} did not answer within {limit:.0f} s" if isinstance(error, TimeoutError) else f"rank {rank} ended"
    )


def _ask(peer: Messages, data: bytes) -> bytes:
    """Send, and receive the answer; or what came unasked, since then nobody reads what is sent."""
    rest = memoryview(peer.pack(data))
    with selectors.DefaultSelector() as selector:
        selector.register(peer.socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while rest:
            events = selector.select(peer.socket.gettimeout())
            if not events:
                raise TimeoutError
            if events[0][1] & selectors.EVENT_READ:
                break
            rest = rest[peer.socket.send(rest) :]
    return peer.receive()


class Agreement:
    """Work that is done by all ranks or by none."""

    def __init__(self, exchange: Exchange, rank: int, world_size: int) -> None:
        self.decide = exchange.decide
        self.addresses = exchange.addresses
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
