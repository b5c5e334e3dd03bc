"""The collectives with their gradients.

The gradients are those of the mean over the ranks of their losses, as Horovod defines them: that of allgather and
broadcast is averaged, and so is that of the sum in reducescatter multiplied by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.horovod.common.process import rank
from paceline.horovod.engine.negotiation import AVERAGE, SUM

from .compression import Compression
from .handles import Call, Result, check_tensor, submit, synchronize


def differentiable(call: Call[Result]) -> Result:
    """Do an operation, and wait for its results, through which gradients flow."""
    tensors, call.tensors = call.tensors, ()  # autograd keeps the call, and must not keep these
    results: Any
    if call.compression is Compression.none:
        results = _apply(call, tensors)
    else:
        for tensor in tensors:
            check_tensor(call.kind, tensor)
        small, contexts = zip(*map(call.compression.compress, tensors), strict=True)
        results = list(map(call.compression.decompress, _apply(call, small), contexts))
    if call.kind == "alltoall":
        return results if call.splits is not None else results[0]  # type: ignore[no-any-return]
    return list(results) if call.grouped else results[0]  # type: ignore[return-value]


def _apply(call: Call[Any], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if not any([getattr(tensor, "requires_grad", False) for tensor in tensors]):
        return _done(call, tensors)  # type: ignore[no-any-return]
    return _Collective.apply(call, *tensors)  # type: ignore[no-any-return, no-untyped-call]


def _done(call: Call[Any], tensors: Sequence[Tensor]) -> Any:
    results = synchronize(submit(call, tensors, is_awaited=True))
    return tuple(results) if call.grouped or call.kind == "alltoall" else (results,)


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call[Any], *tensors: Tensor) -> Any:
        results = _done(call, tensors)
        ctx.call, ctx.shapes = call, [tensor.shape for tensor in tensors]
        if call.kind == "alltoall":
            ctx.received = results[1].cpu().to(torch.int32)
            ctx.mark_non_differentiable(results[1])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        unnamed = replace(ctx.call, name=None)
        return None, *_GRADIENTS[unnamed.kind](ctx, unnamed, grads)


def _of_allreduce(ctx: Any, call: Call[Any], grads: tuple[Tensor, ...]) -> Any:
    """The gradients, reduced alike."""
    return _apply(call, grads)


def _of_allgather(ctx: Any, call: Call[Any], grads: tuple[Tensor, ...]) -> Any:
    """The average of this rank's rows."""
    where, counts = call.process_set, [shape[0] if shape else 0 for shape in ctx.shapes]
    reduced = _averaged(call, grads, grouped=True)
    rows = synchronize(submit(Call("allgather", [torch.tensor([counts])], None, where)))
    first = rows[: where.rank()].sum(dim=0).tolist()
    return [grad.narrow(0, start, count) for grad, start, count in zip(reduced, first, counts, strict=True)]


def _of_broadcast(ctx: Any, call: Call[Any], grads: tuple[Tensor, ...]) -> Any:
    """The average of the gradients on the root, zero elsewhere."""
    (grad,) = _averaged(call, grads, grouped=False)
    return [grad if rank() == call.root else torch.zeros_like(grad)]


def _of_alltoall(ctx: Any, call: Call[Any], grads: tuple[Tensor, ...]) -> Any:
    """The gradients of the rows that were sent; zero for rows that were not."""
    back, _ = _apply(replace(call, extra=tuple(ctx.received.tolist()), splits=ctx.received), grads[:1])
    missing = ctx.shapes[0][0] - back.shape[0]
    return [torch.cat([back, back.new_zeros((missing, *back.shape[1:]))]) if missing else back]


def _of_reducescatter(ctx: Any, call: Call[Any], grads: tuple[Tensor, ...]) -> Any:
    """The gathered gradients."""
    factor = (call.process_set.size() if call.op == SUM else 1) * call.prescale * call.postscale
    parts = [grad * factor if factor != 1 else grad for grad in grads]
    return _apply(Call("allgather", (), None, call.process_set, grouped=True), parts)


def _averaged(call: Call[Any], grads: tuple[Tensor, ...], grouped: bool) -> tuple[Tensor, ...]:
    return _apply(Call("allreduce", (), None, call.process_set, grouped=grouped, op=AVERAGE), grads)


_GRADIENTS = {
    "allreduce": _of_allreduce,
    "allgather": _of_allgather,
    "broadcast": _of_broadcast,
    "alltoall": _of_alltoall,
    "reducescatter": _of_reducescatter,
}
