"""The ranks of a job as one of them sees them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeVar, overload

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .sharded import kind_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from .join import Membership


# -- collectives -------------------------------------------------------------------------------------------------------
# What ranks do together: reduce, gather, broadcast.


T = TypeVar("T")
Reduction = Literal["sum", "mean", "max", "min"]


class Collectives:
    """Collectives of all ranks. With one rank, they return at once and need no process group.

    Attributes:
        rank: position among all ranks, 0 … world_size - 1.
        world_size: number of ranks.
        device: this rank's device.
    """

    rank: int
    world_size: int
    device: torch.device
    _guard: AbstractContextManager[None]  # of each collective; its error says what is known of the other ranks

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes what is the same on all ranks."""
        return self.rank == 0

    @overload
    def all_reduce(self, value: Tensor, op: Reduction = "sum") -> Tensor: ...
    @overload
    def all_reduce(self, value: float, op: Reduction = "sum") -> float: ...
    def all_reduce(self, value: Tensor | float, op: Reduction = "sum") -> Tensor | float:
        """Return the sum, mean, maximum or minimum over all ranks. The argument is not changed.

        Args:
            value: a tensor of the same shape and type on every rank, or a number.
            op: "mean" of integers is a floating-point tensor.

        Returns:
            A tensor of the same shape, or a float if `value` is a number.
        """
        if not isinstance(value, torch.Tensor):
            return float(self.all_reduce(torch.tensor(value, dtype=torch.float64), op))
        if op not in ("sum", "mean", "max", "min"):
            raise ValueError(f"op {op!r} is none of 'sum', 'mean', 'max', 'min'")
        result = value.detach().clone(memory_format=torch.contiguous_format)
        if op == "mean" and not (result.is_floating_point() or result.is_complex()):
            result = result.to(torch.float64)
        if self.world_size > 1:
            reduction = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(op, dist.ReduceOp.SUM)
            result = self._where_exchanged(result)
            with self._guard:
                dist.all_reduce(result, reduction)
            result = result.to(value.device)
        return result / self.world_size if op == "mean" else result

    def _where_exchanged(self, tensor: Tensor) -> Tensor:
        """The tensor on a device whose tensors the group exchanges: with nccl alone, the CPU is none."""
        devices = dist.distributed_c10d._get_default_group()._device_types
        return tensor if tensor.device.type in [each.type for each in devices] else tensor.to(self.device)

    def all_gather(self, tensor: Tensor, *, differentiable: bool = False) -> list[Tensor]:
        """Return every rank's tensor, in rank order. Shapes may differ in the first dimension only.

        Args:
            tensor: of any shape.
            differentiable: whether gradients flow back to the ranks that the tensors come from, as a loss over the
                samples of all ranks needs it. The gradient of `tensor` is then the sum of those that all ranks have for
                it, so all must compute theirs. Second derivatives are an error.
        """
        if differentiable:
            return list(_Gather.apply(self, tensor))  # type: ignore[no-untyped-call]
        return self._gathered(tensor)

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        if self.world_size == 1:
            return [tensor.detach().clone()]
        sizes: list[int] = self.gather_objects(tensor.shape[0] if tensor.dim() else -1)
        if len(set(sizes)) == 1:
            parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in sizes]
            with self._guard:
                dist.all_gather(parts, tensor.detach().contiguous())
            return parts
        padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor.detach()
        parts = [torch.empty_like(padded) for _ in sizes]
        with self._guard:
            dist.all_gather(parts, padded)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def _sum_of_own(self, parts: Sequence[Tensor], own: torch.Size) -> Tensor:
        """The sum over the ranks of what each has for this one."""
        if self.world_size == 1:
            return parts[0]
        sent = torch.cat([part.reshape(-1) for part in parts])
        received = sent.new_empty(self.world_size * own.numel())
        with self._guard:
            dist.all_to_all_single(received, sent, [own.numel()] * self.world_size, [part.numel() for part in parts])
        return received.view(self.world_size, *own).sum(0)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Return the tensor of rank `source`. It has the same shape and type on all ranks, and is not changed."""
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.world_size > 1:
            with self._guard:
                dist.broadcast(result, source)
        return result

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """Return the object that rank `source` passes; it is pickled."""
        if self.world_size == 1:
            return value
        box = [value]
        with self._guard:
            dist.broadcast_object_list(box, source)
        return box[0]

    def gather_objects(self, value: T) -> list[T]:
        """Return the objects of all ranks, in rank order; they are pickled."""
        if self.world_size == 1:
            return [value]
        box: list[Any] = [None] * self.world_size
        with self._guard:
            dist.all_gather_object(box, value)
        return box

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        if self.world_size > 1:
            with self._guard:
                dist.barrier()

    def mean(self, total: Tensor | float, count: Tensor | float) -> float:
        """Return the sum of `total` over all ranks, divided by the sum of `count`: exact also when shards are uneven.

        Both are of this rank alone: pass the number of its own samples, not that of the data set. If the sum of `count`
        is 0, the mean is nan.
        """
        if kind := kind_of(total) or kind_of(count):
            raise TypeError(f"run.mean takes this rank's own numbers, not {kind}; pass what its to_local() returns")
        both = self.all_reduce(torch.tensor([float(total), float(count)], dtype=torch.float64))
        return float(both[0] / both[1])

    def print(
        self,
        *values: object,
        sep: str | None = " ",
        end: str | None = "\n",
        file: TextIO | None = None,
        flush: bool = True,
    ) -> None:
        """Print on rank 0 only, as `print` does. All ranks compute the arguments, so these may contain collectives."""
        if self.is_main:
            print(*values, sep=sep, end=end, file=file, flush=flush)


class _Gather(torch.autograd.Function):
    """All ranks' tensors, and the gradient of this rank's: the sum of all ranks' gradients of it."""

    @staticmethod
    def forward(ctx: Any, collectives: Collectives, tensor: Tensor) -> tuple[Tensor, ...]:
        ctx.collectives, ctx.shape = collectives, tensor.shape
        return tuple(collectives._gathered(tensor))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, ctx.collectives._sum_of_own(grads, ctx.shape)


# -- the group ---------------------------------------------------------------------------------------------------------


class Started:
    """A collective of one tensor that was started; calling it waits for the result.

    Args:
        tensor: becomes the result.
        work: torch's handle; None if the result is there.
        guard: see `Group`.
    """

    def __init__(self, tensor: Tensor, work: dist.Work | None, guard: contextlib.AbstractContextManager[None]) -> None:
        self._tensor, self._work, self._guard = tensor, work, guard

    def __call__(self) -> Tensor:
        """Wait for the result. For the guard all ranks are here, so each calls it as often as the others."""
        if self._work is not None:
            with self._guard:
                self._work.wait()
        return self._tensor

    def peek(self) -> Tensor | None:
        """The result if it is there; None if not, or if the collective has failed. Any rank may call it."""
        if self._work is not None:
            if not self._work.is_completed():
                return None
            try:
                self._work.wait()
            except RuntimeError:  # `__call__` says why
                return None
        return self._tensor


class Group(Collectives):
    """This rank's place among the ranks, and the collectives of all ranks.

    Args:
        membership: what `join` returned.
        guard: context of all that the ranks do together; it may be nested. If that fails, it raises what is known of
            the other ranks. The default does nothing.

    Attributes:
        local_rank: position among the ranks of this machine.
        attempt: number of restarts of the job before this start.
        device: this rank's device.
        data_rank: position among the ranks that have other data; ranks that compute a model's layers together have the
            same.
        data_size: number of ranks that have other data.
        steps: the model whose ranks compute different parts of a step now; others cannot exchange anything then.
    """

    def __init__(self, membership: Membership, guard: contextlib.AbstractContextManager[None] | None = None) -> None:
        placement = membership.placement
        self.rank, self.world_size = placement.rank, placement.world_size
        self.local_rank, self.attempt, self.device = placement.local_rank, placement.attempt, membership.device
        self.guard = self._guard = guard or contextlib.nullcontext()
        self._owns_group = membership.owns_group
        self.data_rank, self.data_size = self.rank, self.world_size
        self.steps: object | None = None

    def share_data(self, ranks: int, option: str) -> None:
        """Let each so many ranks that follow each other have the same data, as an option of the strategy says.

        Raises:
            ValueError: the ranks cannot be divided so.
        """
        if self.world_size % ranks:
            raise ValueError(f"{option}: {self.world_size} ranks cannot be divided into groups of {ranks}")
        self.data_rank, self.data_size = self.rank // ranks, self.world_size // ranks

    @property
    def owns_process_group(self) -> bool:
        """Whether torch's process group was created for this run, and ends with it."""
        return self._owns_group and dist.is_initialized()

    def start_all_reduce(self, tensor: Tensor) -> Started:
        """Start to sum a tensor over all ranks, which may change it; calling what this returns waits for the sum."""
        if self.world_size == 1:
            return Started(tensor, None, self.guard)
        tensor = self._where_exchanged(tensor)
        with self.guard:
            return Started(tensor, dist.all_reduce(tensor, async_op=True), self.guard)
