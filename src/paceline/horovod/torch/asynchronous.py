"""The collectives that return handles for `poll` and `synchronize`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from paceline.horovod.common.basics import engine
from paceline.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.horovod.engine.negotiation import AVERAGE, SUM

from .handles import check_adasum, check_tensor, chosen_op, listed, member_of, submit, synchronize


def _reduce(
    tensors: Sequence[Tensor],
    average: bool | None,
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    *,
    in_place: bool,
    grouped: bool,
) -> int:
    op = chosen_op(op, average)
    check_adasum(op, process_set)
    return submit(
        "allreduce",
        tensors,
        name,
        process_set,
        in_place=in_place,
        grouped=grouped,
        op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
    )


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to reduce a tensor over all ranks; see `allreduce`. Returns a handle."""
    return _reduce(
        [tensor], average, name, op, prescale_factor, postscale_factor, process_set, in_place=False, grouped=False
    )


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to reduce a tensor over all ranks, in place; see `allreduce`. Returns a handle."""
    return _reduce(
        [tensor], average, name, op, prescale_factor, postscale_factor, process_set, in_place=True, grouped=False
    )


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to reduce tensors together; see `grouped_allreduce`. Returns a handle."""
    return _reduce(
        listed("allreduce", tensors),
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        in_place=False,
        grouped=True,
    )


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to reduce tensors together, in place; see `grouped_allreduce`. Returns a handle."""
    return _reduce(
        listed("allreduce", tensors),
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        in_place=True,
        grouped=True,
    )


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
    if op not in (AVERAGE, SUM):
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
        if op == AVERAGE:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.transpose(0, 1), values, tensor.size(), device=tensor.device)

    handle.waits_for = waits  # type: ignore[attr-defined]
    return handle


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start to concatenate the tensors of all ranks; see `allgather`. Returns a handle."""
    return submit("allgather", [tensor], name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to concatenate each tensor with those of all ranks; see `allgather`. Returns a handle."""
    return submit("allgather", listed("allgather", tensors), name, process_set, grouped=True)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to get the tensor of a rank; see `broadcast`. Returns a handle."""
    return submit("broadcast", [tensor], name, process_set, in_place=False, root=_root(root_rank, process_set))


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to get the tensor of a rank, in place; see `broadcast`. Returns a handle."""
    return submit("broadcast", [tensor], name, process_set, in_place=True, root=_root(root_rank, process_set))


def _root(root_rank: int, process_set: ProcessSet) -> int:
    number = member_of(engine(), process_set)
    ranks = engine().sets[number]
    if root_rank not in ranks:
        raise ValueError(f"broadcast received invalid root rank {root_rank}; it must be one of {list(ranks)}")
    return int(root_rank)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Iterable[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to exchange parts of tensors; see `alltoall`. Returns a handle; its result is a pair in any case."""
    check_tensor("alltoall", tensor)
    count = len(engine().sets[member_of(engine(), process_set)])
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits is None:
        if rows % count:
            raise ValueError(
                f"alltoall expects the first dimension of the tensor, {rows}, to be a multiple of the {count} ranks, "
                "or splits to be given"
            )
        sizes = (rows // count,) * count
        like = None
    else:
        like = splits if isinstance(splits, Tensor) else torch.tensor(splits, dtype=torch.int32)
        sizes = _checked(like, rows, count)
    return submit("alltoall", [tensor], name, process_set, extra=sizes, splits=like)


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


def _scatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
    grouped: bool,
) -> int:
    if op not in (AVERAGE, SUM):
        raise NotImplementedError(f"reducescatter reduces with Average or Sum, not with op={op}")
    return submit(
        "reducescatter",
        tensors,
        name,
        process_set,
        grouped=grouped,
        op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
    )


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to reduce a tensor and share it out; see `reducescatter`. Returns a handle."""
    return _scatter([tensor], name, op, process_set, prescale_factor, postscale_factor, False)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to reduce tensors and share each out; see `reducescatter`. Returns a handle."""
    return _scatter(listed("reducescatter", tensors), name, op, process_set, prescale_factor, postscale_factor, True)
