"""The collectives of the PyTorch API.

An operation is named; if no name is given, one is made up, and all ranks must then do the same operations in the same
order. Operations under names may come in any order, from any thread. What ends in `_async` returns a handle for `poll`
and `synchronize`; what has a `_` at the end works in place; everything else supports autograd.

Each operation is described once, by a function with the arguments of Horovod that checks them and returns a `Call`. The
table below makes the public functions of these: one for each way to do an operation.

Source of the semantics: https://horovod.readthedocs.io/en/stable/api.html#module-horovod.torch, version 0.28.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from paceline.horovod.common import basics, process
from paceline.horovod.common.basics import *  # noqa: F403
from paceline.horovod.common.exceptions import HorovodInternalError
from paceline.horovod.common.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from paceline.horovod.common.util import gpu_available  # noqa: F401 - scripts import it from here
from paceline.horovod.engine import negotiation

from .autograd import differentiable
from .compression import Compression, Compressor
from .handles import (
    Call,
    Result,
    check_adasum,
    check_tensor,
    chosen_op,
    in_place,
    listed,
    member_of,
    poll,
    submit,
    submit_in_place,
    synchronize,
)

Average = negotiation.AVERAGE
Sum = negotiation.SUM
Adasum = negotiation.ADASUM
Min = negotiation.MIN
Max = negotiation.MAX
Product = negotiation.PRODUCT

__all__ = [  # noqa: PLE0604
    "Adasum", "Average", "HorovodInternalError", "Max", "Min", "ProcessSet", "Product", "Sum", "add_process_set",
    "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall",
    "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "global_process_set",
    "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async",
    "join", "poll", "reducescatter", "reducescatter_async", "remove_process_set", "sparse_allreduce_async",
    "synchronize",
    *basics.__all__,
]  # fmt: skip

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


# -- the operations ----------------------------------------------------------------------------------------------------

# fmt: off

def _allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Call[Tensor]:
    return _reduced("allreduce", [tensor], chosen_op(op, average), name, prescale_factor, postscale_factor, process_set)


def _allreduce_small(
    tensor: Tensor, average: bool | None = None, name: str | None = None,
    compression: type[Compressor] = Compression.none, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Call[Tensor]:
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
    op = chosen_op(op, average)
    return _reduced("allreduce", [tensor], op, name, prescale_factor, postscale_factor, process_set, compression)


def _grouped_allreduce(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Call[list[Tensor]]:
    op = chosen_op(op, average)
    return _reduced("allreduce", tensors, op, name, prescale_factor, postscale_factor, process_set, grouped=True)


def _grouped_allreduce_small(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None,
    compression: type[Compressor] = Compression.none, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Call[list[Tensor]]:
    """Reduce tensors when all ranks have all of them; the arguments are those of `allreduce`."""
    op = chosen_op(op, average)
    scale = prescale_factor, postscale_factor
    return _reduced("allreduce", tensors, op, name, *scale, process_set, compression, grouped=True)


def _allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Call[Tensor]:
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
    return Call("allgather", [tensor], name, process_set)


def _grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Call[list[Tensor]]:
    """Concatenate each tensor with those of all ranks when all have all of them; see `allgather`."""
    return Call("allgather", listed("allgather", tensors), name, process_set, grouped=True)


def _broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Call[Tensor]:
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
    ranks = process.engine().sets[member_of(process.engine(), process_set)]
    if root_rank not in ranks:
        raise ValueError(f"broadcast received invalid root rank {root_rank}; it must be one of {list(ranks)}")
    return Call("broadcast", [tensor], name, process_set, root=int(root_rank))


def _alltoall(
    tensor: Tensor, splits: Tensor | Iterable[int] | None = None, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Call[Any]:
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
    check_tensor("alltoall", tensor)
    count = len(process.engine().sets[member_of(process.engine(), process_set)])
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits is None:
        if rows % count:
            raise ValueError(
                f"alltoall expects the first dimension of the tensor, {rows}, to be a multiple of the {count} ranks, "
                "or splits to be given"
            )
        return Call("alltoall", [tensor], name, process_set, extra=(rows // count,) * count)
    given = splits if isinstance(splits, Tensor) else torch.tensor(splits, dtype=torch.int32)
    return Call("alltoall", [tensor], name, process_set, extra=_checked(given, rows, count), splits=given)


def _reducescatter(
    tensor: Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Call[Tensor]:
    return _reduced("reducescatter", [tensor], op, name, prescale_factor, postscale_factor, process_set)


def _reducescatter_small(
    tensor: Tensor, name: str | None = None, compression: type[Compressor] = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Call[Tensor]:
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
    return _reduced("reducescatter", [tensor], op, name, prescale_factor, postscale_factor, process_set, compression)


def _grouped_reducescatter(
    tensors: Sequence[Tensor], name: str | None = None, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Call[list[Tensor]]:
    return _reduced("reducescatter", tensors, op, name, prescale_factor, postscale_factor, process_set, grouped=True)


def _grouped_reducescatter_small(
    tensors: Sequence[Tensor], name: str | None = None, compression: type[Compressor] = Compression.none,
    op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Call[list[Tensor]]:
    """Reduce tensors and share each out when all ranks have all of them; see `reducescatter`."""
    scale = prescale_factor, postscale_factor
    return _reduced("reducescatter", tensors, op, name, *scale, process_set, compression, grouped=True)


def _reduced(
    kind: str, tensors: Sequence[Tensor], op: int, name: str | None, prescale: float, postscale: float,
    process_set: ProcessSet, compression: type[Compressor] = Compression.none, *, grouped: bool = False,
) -> Call[Any]:
    if kind == "reducescatter" and op not in (Average, Sum):
        raise NotImplementedError(f"reducescatter reduces with Average or Sum, not with op={op}")
    check_adasum(op, process_set)
    tensors = listed(kind, tensors) if grouped else tensors
    return Call(kind, tensors, name, process_set, grouped, op, prescale, postscale, compression)

# fmt: on


def _checked(splits: Tensor, rows: int, count: int) -> tuple[int, ...]:
    if splits.dtype != torch.int32:
        raise ValueError(f"alltoall expects splits to contain 32-bit integer elements, not {splits.dtype}")
    if splits.dim() != 1 or len(splits) != count:
        raise ValueError(
            f"alltoall expects splits to be {count} numbers, one per rank, not of shape {list(splits.shape)}"
        )
    sizes = tuple(splits.tolist())
    if min(sizes) < 0 or sum(sizes) > rows:
        raise ValueError(
            f"alltoall expects splits of 0 or more that sum to at most the first dimension of the tensor, {rows}; "
            f"they are {list(sizes)}"
        )
    return sizes


# -- the table ---------------------------------------------------------------------------------------------------------


def _made(
    name: str, describe: Callable[Parameters, Call[Result]], do: Callable[[Call[Result]], Returned]
) -> Callable[Parameters, Returned]:
    """The public function of a name: it has the arguments of `describe`, and does what these describe."""

    def operation(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        return do(describe(*args, **kwargs))

    base, is_async, _ = name.partition("_async")
    (returned,) = typing.get_args(typing.get_type_hints(describe)["return"])
    signature = inspect.signature(describe).replace(return_annotation=int if is_async else returned)
    operation.__signature__ = signature  # type: ignore[attr-defined]
    operation.__name__ = operation.__qualname__ = name
    where = " in place" if name.endswith("_") else ""
    if is_async:
        operation.__doc__ = f"Start `{base}`{where}, and return a handle for `poll` and `synchronize`."
    else:
        operation.__doc__ = f"Do `{base.rstrip('_')}` in place." if where else describe.__doc__
    return operation


allreduce = _made("allreduce", _allreduce_small, differentiable)
allreduce_ = _made("allreduce_", _allreduce, in_place)
allreduce_async = _made("allreduce_async", _allreduce, submit)
allreduce_async_ = _made("allreduce_async_", _allreduce, submit_in_place)
grouped_allreduce = _made("grouped_allreduce", _grouped_allreduce_small, differentiable)
grouped_allreduce_ = _made("grouped_allreduce_", _grouped_allreduce, in_place)
grouped_allreduce_async = _made("grouped_allreduce_async", _grouped_allreduce, submit)
grouped_allreduce_async_ = _made("grouped_allreduce_async_", _grouped_allreduce, submit_in_place)
allgather = _made("allgather", _allgather, differentiable)
allgather_async = _made("allgather_async", _allgather, submit)
grouped_allgather = _made("grouped_allgather", _grouped_allgather, differentiable)
grouped_allgather_async = _made("grouped_allgather_async", _grouped_allgather, submit)
broadcast = _made("broadcast", _broadcast, differentiable)
broadcast_ = _made("broadcast_", _broadcast, in_place)
broadcast_async = _made("broadcast_async", _broadcast, submit)
broadcast_async_ = _made("broadcast_async_", _broadcast, submit_in_place)
alltoall = _made("alltoall", _alltoall, differentiable)
alltoall_async = _made("alltoall_async", _alltoall, submit)
reducescatter = _made("reducescatter", _reducescatter_small, differentiable)
reducescatter_async = _made("reducescatter_async", _reducescatter, submit)
grouped_reducescatter = _made("grouped_reducescatter", _grouped_reducescatter_small, differentiable)
grouped_reducescatter_async = _made("grouped_reducescatter_async", _grouped_reducescatter, submit)


# -- the others --------------------------------------------------------------------------------------------------------


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start to reduce a sparse tensor, by gathering indices and values of all ranks.

    Args:
        tensor: in COO layout, of the same shape on all ranks.
        name: of the operation.
        op: Average or Sum.
        process_set: who takes part.

    Returns:
        A function that waits and returns the sparse result, not coalesced; `synchronize` takes it too.

    Raises:
        ValueError: `op` is another one.
    """
    check_tensor("sparse_allreduce_async", tensor)
    if op not in (Average, Sum):
        raise ValueError(f"sparse tensors are reduced with Average or Sum, not op={op}")
    with torch.no_grad():
        own = tensor.detach()
        indices = own._indices().transpose(0, 1).contiguous()
        named = name is not None
        waits = (
            allgather_async(indices, name=f"{name}.indices" if named else None, process_set=process_set),
            allgather_async(own._values(), name=f"{name}.values" if named else None, process_set=process_set),
        )

    def handle() -> Tensor:
        indices, values = (synchronize(one) for one in waits)
        if op == Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.transpose(0, 1), values, tensor.size(), device=tensor.device)

    handle.waits_for = waits  # type: ignore[attr-defined]
    return handle


def join(device: int = -1) -> int:
    """Take part with zeros in the allreduces of the other ranks, until all ranks have joined.

    Args:
        device: accepted; what a joined rank sends is made on the CPU.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: a rank is gone.
    """
    last = int(process.together("join", "join"))
    process.join_ended()
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have called this.

    Raises:
        HorovodInternalError: a rank is gone.
    """
    process.together("barrier", process_set=member_of(process.engine(), process_set))
