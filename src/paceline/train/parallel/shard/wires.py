"""How the ranks that share a model gather its parameters and sum its gradients: by memory, or by the network."""

from __future__ import annotations

import logging
import zlib
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist

from paceline.contract.machine import machine_id
from paceline.train.group.shared_memory import GATHERS, SharedMemory, SharedMemoryError
from paceline.train.parallel.sync.wires.wire import HALVES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from paceline.train.group.group import Group

log = logging.getLogger("paceline")


# -- ways --------------------------------------------------------------------------------------------------------------


class Way(Protocol):
    """How tensors get from one rank of a shard group to the others."""

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent by the network."""

    def all_gather(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the tensors of all ranks to `target`, one after the other."""

    def reduce_scatter(self, source: torch.Tensor, target: torch.Tensor, divisor: float = 1.0) -> None:
        """Sum tensors over the ranks, and divide; each rank gets the chunk of its position."""

    def close(self) -> None:
        """Give back what it holds."""


class Torch:
    """The collectives of torch: on GPUs, and for one rank."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.sent = 0
        self._group, self._ranks = process_group, dist.get_world_size(process_group)

    def all_gather(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See `Way.all_gather`."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name in older versions
        gather(target, source, group=self._group)
        self.sent += (self._ranks - 1) * source.nbytes

    def reduce_scatter(self, source: torch.Tensor, target: torch.Tensor, divisor: float = 1.0) -> None:
        """See `Way.reduce_scatter`."""
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        op = dist.ReduceOp.SUM if divisor == 1 else dist.ReduceOp.AVG
        scatter(target, source, op=op, group=self._group)
        self.sent += (self._ranks - 1) * target.nbytes

    def close(self) -> None:
        """See `Way.close`."""


_PIECE = 1 << 20  # bytes: see `paceline.train.parallel.sync.wires.wire`
_AT_ONCE = 2  # pieces on the way
_TOLD = 1  # the tag of what is passed; those of pieces are larger


class Hop(NamedTuple):
    """Where the pieces of a chunk go, what this rank adds to them, and by what it divides the sums."""

    places: Sequence[torch.Tensor]
    own: Sequence[torch.Tensor] | None = None
    divisor: float = 1.0


class Ring:
    """Passes chunks along a ring of ranks: each sends (K - 1) / K of all bytes, with K ranks, as few as possible.

    gloo's own reduce-scatter sends twice that. The chunk of a rank starts at the rank after it, and each rank adds its
    own on the way, so the order of a sum is always the same. Chunks go in pieces that follow each other, so one is on
    the way while another is added.
    """

    def __init__(self, process_group: dist.ProcessGroup, ranks: Sequence[int], position: int) -> None:
        self.sent = 0
        self._group, self._ranks, self._position = process_group, len(ranks), position
        self._next, self._previous = ranks[(position + 1) % len(ranks)], ranks[position - 1]
        self._tag = _TOLD
        self._unread: tuple[list[dist.Work], list[torch.Tensor]] | None = None  # what is passed, there and here

    def all_gather(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See `Way.all_gather`."""
        self._tell(0, source)
        rows = _pieces(target, self._ranks)
        target.view(self._ranks, len(source))[self._position].copy_(source)
        hops = [Hop(rows[self._position - 1 - hop]) for hop in range(self._ranks - 1)]
        self._around(rows[self._position], hops)

    def reduce_scatter(self, source: torch.Tensor, target: torch.Tensor, divisor: float = 1.0) -> None:
        """See `Way.reduce_scatter`."""
        self._tell(1, source)
        rows = _pieces(source, self._ranks)
        buffers = [_pieces(each, 1)[0] for each in (target, torch.empty_like(target))]
        hops = [Hop(buffers[(self._ranks - hop) % 2], rows[self._position - 2 - hop]) for hop in range(self._ranks - 1)]
        hops[-1] = hops[-1]._replace(divisor=divisor)
        self._around(rows[self._position - 1], hops)

    def close(self) -> None:
        """See `Way.close`."""

    def _around(self, first: Sequence[torch.Tensor], hops: Sequence[Hop]) -> None:
        """Send pieces to the next rank, and in each later hop what has arrived from the rank before."""
        arriving: deque[dist.Work] = deque()
        leaving: deque[dist.Work] = deque()
        at_once = min(_AT_ONCE, len(first))  # what has arrived has left again before its buffer is used again
        pieces: Iterable[torch.Tensor] = first
        for hop in hops:
            for piece, place in zip(pieces, hop.places, strict=True):
                if len(leaving) == at_once:
                    self._wait(leaving.popleft())
                arriving.append(self._receive(place))
                leaving.append(self._send(piece))
                self.sent += piece.nbytes
            pieces = self._arrivals(arriving, hop)
        deque(pieces, maxlen=0)
        for work in leaving:
            work.wait()

    def _arrivals(self, arriving: deque[dist.Work], hop: Hop) -> Iterator[torch.Tensor]:
        """What arrives, with this rank's own added to it; divided before it is rounded to 16 bits."""
        for number, received in enumerate(hop.places):
            self._wait(arriving.popleft())
            if hop.own is not None:
                total = received.float() if received.dtype in HALVES else received
                total += hop.own[number]
                if hop.divisor != 1:
                    total /= hop.divisor
                received.copy_(total)
            yield received

    def _tell(self, kind: int, tensor: torch.Tensor) -> None:
        """Tell the next rank what this one passes; pieces have a tag of it.

        gloo would end the process, or mix up numbers, if ranks that pass different tensors came together.
        """
        own = torch.tensor([kind, tensor.numel(), tensor.element_size()])
        other = torch.empty_like(own)
        self._tag = _TOLD
        self._unread = [self._receive(other), self._send(own)], [other, own]
        self._tag = _TOLD + 1 + zlib.crc32(str(own.tolist()).encode()) % (1 << 30)

    def _wait(self, work: dist.Work) -> None:
        """Wait for a piece, the first time after it is known that the rank before this one passes the same."""
        if self._unread is not None:
            works, told = self._unread
            self._unread = None
            for each in works:
                each.wait()
            if not torch.equal(*told):
                raise RuntimeError("the ranks of this shard group exchange different tensors")
        work.wait()

    def _receive(self, tensor: torch.Tensor) -> dist.Work:
        return _started(dist.irecv(tensor, self._previous, group=self._group, tag=self._tag))

    def _send(self, tensor: torch.Tensor) -> dist.Work:
        return _started(dist.isend(tensor, self._next, group=self._group, tag=self._tag))


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work


def _pieces(tensor: torch.Tensor, rows: int) -> list[tuple[torch.Tensor, ...]]:
    """The pieces of each row of a tensor."""
    size = max(1, _PIECE // tensor.element_size())
    return [torch.split(row, size) for row in tensor.view(rows, tensor.numel() // rows)]


def _way(group: Group, ranks: Sequence[int], process_group: dist.ProcessGroup) -> Way:
    """The way among the ranks of this rank's shard group. A collective of all ranks of the run."""
    if group.device.type != "cpu":
        return Torch(process_group)

    def gather(text: str) -> list[str]:
        texts = group.gather_objects(text)
        return [texts[rank] for rank in ranks]

    position = ranks.index(group.rank)
    memory: SharedMemory | None = None
    why = ""
    if len(set(gather(machine_id()))) == 1 and len(ranks) > 1:
        try:
            memory = SharedMemory(position, len(ranks), gather, _seconds(process_group, group.device))
        except SharedMemoryError as error:
            why = str(error)
    else:
        for _ in range(GATHERS):
            gather("")
    problems = [problem for problem in group.gather_objects(why) if problem]
    if problems and group.is_main:
        log.warning("ranks of one machine exchange shards by sockets: they cannot share memory: %s", problems[0])
    if memory is not None:
        return memory
    return Ring(process_group, ranks, position) if len(ranks) > 1 else Torch(process_group)


def _seconds(process_group: dist.ProcessGroup, device: torch.device) -> float:
    """How long collectives wait for other ranks."""
    found: float = process_group._get_backend(device).options._timeout.total_seconds()
    return found


# -- what FSDP2 calls --------------------------------------------------------------------------------------------------


class _Collective:
    """What torch's `AllGather` and `ReduceScatter` of FSDP2 have in common; these are private, and not asked for."""

    def __init__(self, way: Way, guard: AbstractContextManager[None]) -> None:
        self._way, self._guard = way, guard

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The memory of a tensor that is passed."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Collective):
    """For `FSDPModule.set_custom_all_gather`."""

    def all_gather(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gather; this never returns a handle, since it waits for the result also if `async_op`."""
        with self._guard:
            self._way.all_gather(input_tensor, output_tensor)

    __call__ = all_gather  # under this name it is in messages of what ranks have entered


class ReduceScatter(_Collective):
    """For `FSDPModule.set_custom_reduce_scatter`."""

    def reduce_scatter(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Sum or average; this never returns a handle, since it waits for the result also if `async_op`."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"gradients are summed or averaged, not reduced by {op}")
        divisor = 1.0 if op == dist.ReduceOp.SUM else float(dist.get_world_size(group))
        with self._guard:
            self._way.reduce_scatter(input_tensor, output_tensor, divisor)

    __call__ = reduce_scatter  # see `AllGather`


class Wires:
    """The collectives of this rank's shard group. All ranks of the run make theirs at the same time.

    Args:
        group: all ranks of the run.
        ranks: those of the shard group, in order.
        process_group: of these.

    Attributes:
        all_gather: for `FSDPModule.set_custom_all_gather`.
        reduce_scatter: for `FSDPModule.set_custom_reduce_scatter`.
    """

    def __init__(self, group: Group, ranks: Sequence[int], process_group: dist.ProcessGroup) -> None:
        self._way = _way(group, ranks, process_group)
        self.all_gather = AllGather(self._way, group.guard)
        self.reduce_scatter = ReduceScatter(self._way, group.guard)

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent to ranks with which it shares no memory."""
        return self._way.sent

    def close(self) -> None:
        """Leave the others: those who wait for this rank in shared memory fail."""
        self._way.close()
