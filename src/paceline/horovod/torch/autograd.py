"""The collectives with their gradients.

The gradients are those of the mean over the ranks of their losses, as Horovod defines them: that of allgather and
broadcast is averaged, and so is that of the sum in reducescatter multiplied by the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.horovod.common.basics import rank
from paceline.horovod.engine.negotiation import AVERAGE, SUM

from . import asynchronous
from .handles import synchronize


class Allreduce(torch.autograd.Function):
    """Of one tensor or a group; its gradient is reduced alike."""

    @staticmethod
    def forward(ctx: Any, name: Any, op: Any, scale: Any, process_set: Any, grouped: Any, *tensors: Tensor) -> Any:
        """The reduced tensors."""
        ctx.how = op, scale, process_set, grouped
        prescale, postscale = scale
        if grouped:
            handle = asynchronous.grouped_allreduce_async(tensors, None, name, op, prescale, postscale, process_set)
            return tuple(synchronize(handle))
        return (
            synchronize(asynchronous.allreduce_async(tensors[0], None, name, op, prescale, postscale, process_set)),
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The reduced gradients."""
        op, scale, process_set, grouped = ctx.how
        return None, None, None, None, None, *Allreduce.apply(None, op, scale, process_set, grouped, *grads)  # type: ignore[no-untyped-call]


class Allgather(torch.autograd.Function):
    """Of one tensor or a group; of its gradient, this rank gets the average of its rows."""

    @staticmethod
    def forward(ctx: Any, name: Any, process_set: Any, grouped: Any, *tensors: Tensor) -> Any:
        """The concatenated tensors."""
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        ctx.process_set = process_set
        if grouped:
            return tuple(synchronize(asynchronous.grouped_allgather_async(tensors, name, process_set)))
        return (synchronize(asynchronous.allgather_async(tensors[0], name, process_set)),)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The average of this rank's rows."""
        where = ctx.process_set
        reduced = Allreduce.apply(None, AVERAGE, (1.0, 1.0), where, True, *grads)  # type: ignore[no-untyped-call]
        rows = synchronize(asynchronous.allgather_async(torch.tensor([ctx.rows]), process_set=where))
        first = rows[: where.rank()].sum(dim=0).tolist()
        parts = [grad.narrow(0, start, count) for grad, start, count in zip(reduced, first, ctx.rows, strict=True)]
        return None, None, None, *parts


class Broadcast(torch.autograd.Function):
    """Its gradient is averaged on the root, and zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: Any, name: Any, process_set: Any) -> Any:
        """The root's tensor."""
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(asynchronous.broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The average of the gradients, on the root."""
        (grad,) = Allreduce.apply(None, AVERAGE, (1.0, 1.0), ctx.process_set, False, grads[0])  # type: ignore[no-untyped-call]
        return grad if rank() == ctx.root_rank else torch.zeros_like(grad), None, None, None


class Alltoall(torch.autograd.Function):
    """Its gradient goes back where the rows came from."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: Any, process_set: Any) -> Any:
        """What came, and with splits how much from each rank."""
        output, received = synchronize(asynchronous.alltoall_async(tensor, splits, name, process_set))
        ctx.process_set, ctx.received, ctx.shape = process_set, received.cpu().to(torch.int32), tensor.shape
        if splits is None:
            return output
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradients of the rows that were sent; zero for rows that were not."""
        back, _ = Alltoall.apply(grads[0], ctx.received, None, ctx.process_set)  # type: ignore[no-untyped-call]
        if back.shape[0] < ctx.shape[0]:
            back = torch.cat([back, back.new_zeros((ctx.shape[0] - back.shape[0], *ctx.shape[1:]))])
        return back, None, None, None


class Reducescatter(torch.autograd.Function):
    """Of one tensor or a group; its gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, name: Any, op: Any, scale: Any, process_set: Any, grouped: Any, *tensors: Tensor) -> Any:
        """This rank's rows of the reduced tensors."""
        ctx.how = op, scale, process_set, grouped
        if grouped:
            return tuple(synchronize(asynchronous.grouped_reducescatter_async(tensors, name, op, process_set, *scale)))
        return (synchronize(asynchronous.reducescatter_async(tensors[0], name, op, process_set, *scale)),)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gathered gradients."""
        op, (prescale, postscale), process_set, _ = ctx.how
        factor = (process_set.size() if op == SUM else 1) * prescale * postscale
        parts = [grad * factor if factor != 1 else grad for grad in grads]
        return None, None, None, None, None, *Allgather.apply(None, process_set, True, *parts)  # type: ignore[no-untyped-call]
