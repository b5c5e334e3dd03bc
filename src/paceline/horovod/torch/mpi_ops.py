"""The collectives of the PyTorch API.

An operation is named; if no name is given, one is made up, and all ranks must then do the same operations in the same
order. Operations under names may come in any order, from any thread. What ends in `_async` returns a handle for `poll`
and `synchronize`; what has a `_` at the end works in place; everything else supports autograd.

Source of the semantics: https://horovod.readthedocs.io/en/stable/api.html#module-horovod.torch, version 0.28.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from paceline.horovod.common.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from paceline.horovod.common.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from paceline.horovod.engine import negotiation

from . import autograd
from .asynchronous import (
    allgather_async,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    reducescatter_async,
    sparse_allreduce_async,
)
from .compression import Compression, Compressor
from .handles import barrier as _barrier
from .handles import check_adasum, check_tensor, chosen_op, listed, poll, synchronize
from .handles import join as _join

Average = negotiation.AVERAGE
Sum = negotiation.SUM
Adasum = negotiation.ADASUM
Min = negotiation.MIN
Max = negotiation.MAX
Product = negotiation.PRODUCT

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]  # fmt: skip


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over all ranks, and return the result. The gradient is reduced in the same way.

    Args:
        tensor: of the same shape and type on all ranks; it is not changed.
        average: deprecated: whether `op` is Average or Sum.
        name: of the operation.
        compression: how it is made smaller for sending.
        op: Average (the default), Sum, Adasum, Min, Max or Product. The average of integers is cut off.
        prescale_factor: the tensor is multiplied by it before.
        postscale_factor: the result is multiplied by it.
        process_set: who takes part.

    Raises:
        HorovodInternalError: the ranks disagree, or a rank is gone.
        ValueError: an operation of this name has not ended, or `process_set` lacks this rank.
    """
    check_tensor("allreduce", tensor)
    small, ctx = compression.compress(tensor)
    op = chosen_op(op, average)
    check_adasum(op, process_set)
    scale = prescale_factor, postscale_factor
    (result,) = autograd.Allreduce.apply(name, op, scale, process_set, False, small)  # type: ignore[no-untyped-call]
    return compression.decompress(result, ctx)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over all ranks in place; see `allreduce`."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    result: Tensor = synchronize(handle)
    return result


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce tensors when all ranks have all of them; the arguments are those of `allreduce`."""
    small, ctxs = zip(*map(compression.compress, listed("allreduce", tensors)), strict=True)
    op = chosen_op(op, average)
    check_adasum(op, process_set)
    scale = prescale_factor, postscale_factor
    results = autograd.Allreduce.apply(name, op, scale, process_set, True, *small)  # type: ignore[no-untyped-call]
    return [compression.decompress(result, ctx) for result, ctx in zip(results, ctxs, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce tensors together in place; see `grouped_allreduce`."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    result: list[Tensor] = synchronize(handle)
    return result


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate the tensors of all ranks along the first dimension, in rank order.

    Args:
        tensor: of the same type and shape on all ranks but for the first dimension.
        name: of the operation.
        process_set: who takes part.

    Returns:
        A tensor whose first dimension is the sum of all. The gradient is the average over the ranks.

    Raises:
        HorovodInternalError: the ranks disagree, or a rank is gone.
    """
    check_tensor("allgather", tensor)
    (result,) = autograd.Allgather.apply(name, process_set, False, tensor)  # type: ignore[no-untyped-call]
    return result  # type: ignore[no-any-return]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Concatenate each tensor with those of all ranks when all have all of them; see `allgather`."""
    return list(autograd.Allgather.apply(name, process_set, True, *listed("allgather", tensors)))  # type: ignore[no-untyped-call]


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensor of one rank.

    Args:
        tensor: of the same shape and type on all ranks; it is not changed.
        root_rank: the global rank whose tensor it is.
        name: of the operation.
        process_set: who takes part; the root does.

    Raises:
        HorovodInternalError: the ranks disagree, or a rank is gone.
        ValueError: the root does not belong to `process_set`.
    """
    return autograd.Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call, no-any-return]


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Get the tensor of one rank, in place; see `broadcast`."""
    result: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def alltoall(
    tensor: Tensor,
    splits: Tensor | Iterable[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a part of the first dimension to each rank, and receive one from each.

    Args:
        tensor: of the same type and shape on all ranks but for the first dimension.
        splits: how many rows each rank gets, in rank order, as int32; equal parts by default.
        name: of the operation.
        process_set: who takes part.

    Returns:
        What came, in rank order; with `splits`, also the number of rows that came from each rank.

    Raises:
        HorovodInternalError: the ranks disagree, or a rank is gone.
        ValueError: `splits` does not fit the tensor and the ranks.
    """
    return autograd.Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor over all ranks, and return this rank's share of its first dimension.

    Args:
        tensor: of the same shape and type on all ranks.
        name: of the operation.
        compression: how it is made smaller for sending.
        op: Average or Sum.
        process_set: who takes part.
        prescale_factor: the tensor is multiplied by it before.
        postscale_factor: the result is multiplied by it.

    Returns:
        Some rows; if they cannot be shared out equally, the first ranks get one more.

    Raises:
        HorovodInternalError: the ranks disagree, or a rank is gone.
    """
    check_tensor("reducescatter", tensor)
    small, ctx = compression.compress(tensor)
    scale = prescale_factor, postscale_factor
    (result,) = autograd.Reducescatter.apply(name, op, scale, process_set, False, small)  # type: ignore[no-untyped-call]
    return compression.decompress(result, ctx)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce tensors and share each out when all ranks have all of them; see `reducescatter`."""
    small, ctxs = zip(*map(compression.compress, listed("reducescatter", tensors)), strict=True)
    scale = prescale_factor, postscale_factor
    results = autograd.Reducescatter.apply(name, op, scale, process_set, True, *small)  # type: ignore[no-untyped-call]
    return [compression.decompress(result, ctx) for result, ctx in zip(results, ctxs, strict=True)]


def join(device: int = -1) -> int:
    """Take part with zeros in the allreduces of the other ranks, until all ranks have joined.

    Args:
        device: accepted; what a joined rank sends is made on the CPU.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: a rank is gone.
    """
    return _join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have called this.

    Raises:
        HorovodInternalError: a rank is gone.
    """
    _barrier(process_set)
