"""Doing a batch of operations as one collective of a process group, and what comes before and after."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, AllToAllOptions, BroadcastOptions, ReduceOp

from .buffers import bytes_in, bytes_of, copy_out, divide, divide_out, scale
from .entries import Entry
from .fusion import dtype_of, size_of
from .negotiation import ADASUM, AVERAGE, MAX, MIN, PRODUCT, SUM

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch._C._distributed_c10d import ProcessGroup

    from paceline.train.group.shared_memory import SharedMemory

    from .buffers import Buffers
    from .negotiation import Request, Response
    from .sums import Sums

# gloo reduces none of these. The wider type has the same sums, up to its own overflow, which is cut off again.
_WIDER = {"int16": torch.int32, "uint16": torch.int32, "uint32": torch.int64, "uint64": torch.int64}
_OPS = {
    AVERAGE: ReduceOp.SUM,
    SUM: ReduceOp.SUM,
    MIN: ReduceOp.MIN,
    MAX: ReduceOp.MAX,
    PRODUCT: ReduceOp.PRODUCT,
}
_LARGE = 1 << 16  # numbers in a buffer whose memory does not fit into the caches
_SHARED = 1 << 16  # bytes that are added up in shared memory, if there is any
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Members:
    """The ranks of a process set, as one of them sees them."""

    def __init__(
        self, ranks: tuple[int, ...], rank: int, group: ProcessGroup | None, shared: Sums | None = None
    ) -> None:
        self.ranks = ranks  # their global ranks
        self.index = ranks.index(rank)  # of this rank among them
        self.group = group  # their process group; None for a single rank
        self.shared = shared  # adds up in memory that they share; None if they are on several machines

    @property
    def size(self) -> int:
        return len(self.ranks)

    def close(self) -> None:
        """Release the memory that they share; what is under way there fails."""
        if self.shared is not None:
            self.shared.close()


class Execution:
    """One batch, from the tensors submitted to the results."""

    def __init__(
        self,
        batch: list[Response],
        entries: list[Entry],
        members: Members,
        buffers: Buffers,
        done: Callable[[str], None],  # called once, from any thread, with the reason of a failure or ""
        mark: Callable[[str], None] | None,  # called with what begins, and with "" when it ends
    ) -> None:
        self._batch = batch
        self._entries = entries
        self._members = members
        self._buffers = buffers
        self._done = done
        self._mark = mark or (lambda _: None)
        self._request: Request = batch[0].request
        self._divisor = members.size if self._request.op == AVERAGE else 1
        self._work: Any = None

    def start(self) -> None:
        """Start the collective; `done` is called at its end, or before this returns."""
        kind = self._request.kind
        for entry in self._entries:
            entry.stage()
        self._inputs = [tensor for entry in self._entries for tensor in entry.inputs]
        self._targets = [tensor for entry in self._entries for tensor in entry.targets or ()]
        if kind in ("allreduce", "reducescatter"):
            if self._request.op == ADASUM:
                self._adasum()
            elif self._members.shared is not None and self._is_for_shared_memory():
                self._add_up(self._members.shared)
            else:
                self._reduce()
        elif kind == "broadcast":
            self._broadcast()
        elif kind == "allgather":
            self._gather()
        else:
            self._exchange()

    def _launch(self, collective: Callable[[ProcessGroup], Any], what: str, finish: Callable[[], None]) -> None:
        """Start a collective, and call `finish` when it has ended; at once if there is only one rank."""
        group = self._members.group

        def end(future: Any) -> None:
            error = ""
            try:
                if future is not None:
                    future.value()  # raises its failure
                self._mark("")
                self._mark("MEMCPY_OUT_FUSION_BUFFER")
            except Exception as failure:
                error = _text(failure)
            self._end(error, finish)

        self._mark(what)
        if group is None or collective is _nothing:
            end(None)
            return
        self._work = collective(group)
        self._work.get_future().add_done_callback(end)

    def _end(self, error: str, finish: Callable[[], None]) -> None:
        """Give the results to the entries unless there is a failure, and report the end."""
        try:
            if not error:
                with torch.no_grad():
                    finish()
                    for entry in self._entries:
                        entry.unstage()
            self._mark("")
        except Exception as failure:
            error = _text(failure)
        self._done(error)

    # -- in shared memory ----------------------------------------------------------------------------------------------

    def _is_for_shared_memory(self) -> bool:
        """Whether these are sums of large tensors; all ranks say the same."""
        request = self._request
        dtypes = {dtype for dtype, _ in request.tensors}
        return (
            request.kind == "allreduce"
            and request.op in (AVERAGE, SUM)
            and len(dtypes) == 1
            and dtype_of(dtypes.pop()) in _FLOATS
            and sum(size_of(response.request) for response in self._batch) >= _SHARED
        )

    def _add_up(self, shared: Sums) -> None:
        request, targets = self._request, self._targets
        sources = [tensor.reshape(-1) for tensor in self._inputs]
        is_direct = all([target.is_contiguous() for target in targets])
        results = [target.view(-1) for target in targets] if is_direct else [torch.empty_like(one) for one in sources]

        def add(memory: SharedMemory) -> None:
            pre, post = request.prescale, request.postscale
            memory.sum(sources, results, prescale=pre, divisor=self._divisor, postscale=post)

        def finish() -> None:
            for target, result in zip(targets, results, strict=True) if not is_direct else ():
                target.copy_(result.view(target.shape))

        self._mark("SHARED_MEMORY_ALLREDUCE")
        shared.add_up(add, lambda error: self._end(error, finish))

    # -- reductions ----------------------------------------------------------------------------------------------------

    def _reduce(self) -> None:
        request = self._request
        inputs, targets = self._inputs, self._targets
        name = request.tensors[0][0]
        work_type = _WIDER.get(name) or dtype_of(name)
        self._mark("MEMCPY_IN_FUSION_BUFFER")
        with torch.no_grad():
            alone = len(inputs) == 1 and request.kind == "allreduce" and work_type == inputs[0].dtype
            alone = alone and targets[0].is_contiguous()
            if alone:
                if targets[0] is not inputs[0] and targets[0].data_ptr() != inputs[0].data_ptr():
                    targets[0].copy_(inputs[0])
                buffer = targets[0].view(-1)
                targets = []
            else:
                flat = [tensor.reshape(-1).to(work_type) for tensor in inputs]
                buffer = self._buffers.take(work_type, sum(len(part) for part in flat))
                torch.cat(flat, out=buffer)
            scale(buffer, request.prescale)
        self._mark("")
        options = AllreduceOptions()
        options.reduceOp = _OPS[request.op]  # type: ignore[assignment]

        def start(group: ProcessGroup) -> Any:
            over = torch.view_as_real(buffer) if buffer.is_complex() else buffer
            return group.allreduce([over], options)

        def finish() -> None:
            divisor = self._divisor
            if targets and buffer.numel() >= _LARGE and buffer.is_floating_point() and request.postscale == 1.0:
                divide_out(buffer, targets, divisor)
            else:
                divide(buffer, divisor)
                scale(buffer, request.postscale)
                if request.kind == "reducescatter":
                    self._scatter(buffer)
                elif targets:
                    copy_out(buffer, targets)
            if not alone:
                self._buffers.give_back(buffer)

        self._launch(start if buffer.numel() else _nothing, "GLOO_ALLREDUCE", finish)

    def _scatter(self, buffer: Tensor) -> None:
        """Keep this rank's rows of each tensor."""
        position = 0
        for entry in self._entries:
            entry.outputs = []
            for tensor in entry.inputs:
                whole = buffer[position : position + tensor.numel()].view(tensor.shape).to(tensor.dtype)
                position += tensor.numel()
                first, rows = share(tensor.shape[0], self._members.size, self._members.index)
                entry.outputs.append(whole[first : first + rows].clone())

    def _adasum(self) -> None:
        """Gather what all ranks have, and combine it on each."""
        with torch.no_grad():
            own = [tensor.reshape(-1) * self._request.prescale for tensor in self._inputs]
            buffer = torch.cat([tensor.to(torch.float64) for tensor in own])
        gathered = [torch.empty_like(buffer) for _ in self._members.ranks]
        if self._members.size == 1:
            gathered = [buffer]

        def finish() -> None:
            position = 0
            for target in self._targets:
                end = position + target.numel()
                total = _combine([one[position:end] for one in gathered])
                target.copy_((total * self._request.postscale).view(target.shape))
                position = end

        start = (lambda group: group.allgather([gathered], [buffer])) if buffer.numel() else _nothing
        self._launch(start, "GLOO_ADASUM", finish)

    # -- operations that move bytes ------------------------------------------------------------------------------------

    def _broadcast(self) -> None:
        root = self._members.ranks.index(self._request.root)
        is_root = root == self._members.index
        inputs, targets = self._inputs, self._targets
        self._mark("MEMCPY_IN_FUSION_BUFFER")
        with torch.no_grad():
            if is_root:
                for tensor, target in zip(inputs, targets, strict=True):
                    if tensor is not target:
                        target.copy_(tensor)
                buffer = bytes_of(targets)
            elif len(targets) == 1 and targets[0].is_contiguous():
                buffer = bytes_in(targets[0])
            else:
                buffer = torch.empty(sum(target.nbytes for target in targets), dtype=torch.uint8)
        self._mark("")
        is_direct = len(targets) == 1 and targets[0].is_contiguous()
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0

        def finish() -> None:
            position = 0
            for target in targets if not (is_root or is_direct) else ():
                end = position + target.nbytes
                own = torch.empty(target.shape, dtype=target.dtype)
                bytes_in(own).copy_(buffer[position:end])
                target.copy_(own)
                position = end

        start = (lambda group: group.broadcast([buffer], options)) if buffer.numel() else _nothing
        self._launch(start, "GLOO_BCAST", finish)

    def _gather(self) -> None:
        extents = [response.extents for response in self._batch]
        rows = [  # bytes of a row of each tensor of each entry
            [math.prod(shape[1:]) * dtype_of(dtype).itemsize for dtype, shape in entry.request.tensors]
            for entry in self._entries
        ]
        sizes = [
            sum(
                first * size
                for each, row in zip(extents, rows, strict=True)
                for first, size in zip(each[member], row, strict=True)
            )
            for member in range(self._members.size)
        ]
        most = max(sizes)
        self._mark("MEMCPY_IN_FUSION_BUFFER")
        with torch.no_grad():
            own = torch.empty(most, dtype=torch.uint8)
            own[: sizes[self._members.index]] = bytes_of(self._inputs)
            gathered = [torch.empty_like(own) for _ in sizes] if self._members.size > 1 else [own]
        self._mark("")

        def finish() -> None:
            positions = [0] * len(sizes)
            for entry, each, row in zip(self._entries, extents, rows, strict=True):
                entry.outputs = []
                for place, (tensor, size) in enumerate(zip(entry.inputs, row, strict=True)):
                    firsts = [extent[place] for extent in each]
                    output = torch.empty((sum(firsts), *tensor.shape[1:]), dtype=tensor.dtype)
                    data, at = bytes_in(output), 0
                    for member, first in enumerate(firsts):
                        count = first * size
                        start = positions[member]
                        data[at : at + count] = gathered[member][start : start + count]
                        positions[member] += count
                        at += count
                    entry.outputs.append(output)

        start = (lambda group: group.allgather([gathered], [own])) if most else _nothing
        self._launch(start, "GLOO_ALLGATHER", finish)

    def _exchange(self) -> None:
        (entry,) = self._entries
        (response,) = self._batch
        (tensor,) = entry.inputs
        row = math.prod(tensor.shape[1:]) * tensor.element_size()
        sends = [count * row for count in response.extents[self._members.index]]
        received = [splits[self._members.index] for splits in response.extents]
        output = torch.empty((sum(received), *tensor.shape[1:]), dtype=tensor.dtype)
        into, data = bytes_in(output), bytes_of([tensor])[: sum(sends)]

        def finish() -> None:
            if self._members.group is None:
                into.copy_(data)
            entry.outputs = [output]
            entry.received = received

        def start(group: ProcessGroup) -> Any:
            return group.alltoall_base(into, data, [count * row for count in received], sends, AllToAllOptions())

        moved = row * sum(map(sum, response.extents))
        self._launch(start if moved else _nothing, "GLOO_ALLTOALL", finish)


def zeros(response: Response) -> Entry:
    """The part of a rank that has joined."""
    tensors = [torch.zeros(shape, dtype=dtype_of(dtype)) for dtype, shape in response.request.tensors]
    return Entry(response.request._replace(device="cpu"), tensors, tensors, tensors)


def share(rows: int, size: int, index: int) -> tuple[int, int]:
    """The first row and the number of rows of a rank's share in reducescatter: the first ranks get the odd ones."""
    each, odd = divmod(rows, size)
    return index * each + min(index, odd), each + (index < odd)


def _nothing(_group: ProcessGroup) -> None:
    """Stands for a collective of no data."""


def _text(failure: Exception) -> str:
    """Why something has failed; never ""."""
    return str(failure) or type(failure).__name__


def _combine(vectors: list[Tensor]) -> Tensor:
    """Combine the vectors of 2ᵏ ranks by Adasum, pair by pair; rank 0 with rank 1 first.

    It adds vectors that are orthogonal, and averages those that are parallel. Source: Maleki et al., "Scaling
    Distributed Training with Adaptive Summation", arXiv 2006.02924, eq. 4.
    """
    while len(vectors) > 1:
        vectors = [_pair(one, other) for one, other in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def _pair(one: Tensor, other: Tensor) -> Tensor:
    dot, ones, others = float(one @ other), float(one @ one), float(other @ other)
    return one * (1 - dot / (2 * ones) if ones else 1.0) + other * (1 - dot / (2 * others) if others else 1.0)
