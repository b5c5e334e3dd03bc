"""The collectives of the TensorFlow API: those of the PyTorch API, done with tensors of TensorFlow.

All of them support gradients. In a graph each is one node, in which it waits for the other ranks.

Source of the semantics: https://horovod.readthedocs.io/en/stable/api.html#module-horovod.tensorflow, version 0.28.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from paceline.horovod.common import basics, process
from paceline.horovod.common.basics import *  # noqa: F403
from paceline.horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    process_set_by_id,
    remove_process_set,
)
from paceline.horovod.common.util import gpu_available  # noqa: F401 - scripts import it from here
from paceline.horovod.engine.negotiation import OP_NAMES
from paceline.horovod.torch import mpi_ops as engine
from paceline.horovod.torch.functions import begins_anew
from paceline.horovod.torch.handles import check_adasum, chosen_op
from paceline.horovod.torch.mpi_ops import Adasum, Average, HorovodInternalError, Max, Min, Product, Sum

from .bridge import collective, traced_name
from .compression import Compression, Compressor
from .replicas import ComparedVariables

__all__ = [  # noqa: PLE0604
    "Adasum", "Average", "HorovodInternalError", "Max", "Min", "ProcessSet", "Product", "Sum", "add_process_set",
    "allgather", "allreduce", "alltoall", "barrier", "broadcast", "broadcast_", "global_process_set",
    "grouped_allgather", "grouped_allreduce", "grouped_reducescatter", "join", "local_rank_op", "local_size_op",
    "process_set_included_op", "rank_op", "reducescatter", "remove_process_set", "size_op",
    *basics.__all__,
]  # fmt: skip


# fmt: off


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor over all ranks, and return the result. The gradient is reduced in the same way.

    Args:
        tensor: of the same shape and type on all ranks; or IndexedSlices, whose slices are gathered.
        average: deprecated: whether `op` is Average or Sum.
        device_dense, device_sparse, ignore_name_scope: accepted; collectives run on the CPU.
        compression: how it is made smaller for sending.
        op: Average (the default), Sum, Adasum, Min, Max or Product; Average or Sum of IndexedSlices.
        prescale_factor: the tensor is multiplied by it before.
        postscale_factor: the result is multiplied by it.
        name: of the operation; in a graph one is made of its place there, which is the same on all ranks.
        process_set: who takes part.

    Raises:
        HorovodInternalError: the ranks disagree, or a rank is gone; see `bridge.collective`.
        NotImplementedError: another reduction of IndexedSlices, or factors with them.
        ValueError: an operation of this name has not ended, or `process_set` lacks this rank.
    """
    op = chosen_op(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        if prescale_factor != 1.0 or postscale_factor != 1.0:
            raise NotImplementedError("IndexedSlices take no prescale_factor and no postscale_factor")
        return reduce_all([tensor], [name or traced_name("sparse_allreduce")], op, process_set)[0]
    scale = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return _reduced("allreduce", [tensor], op, name, process_set, compression, scale)[0]


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """`allreduce` with the arguments of Horovod's own operation, which scripts call directly; a sum by default."""
    return allreduce(tensor, None, "", "", Compression.none, op, prescale_factor, postscale_factor, name, process_set)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduce tensors when all ranks have all of them; the arguments are those of `allreduce`."""
    op = chosen_op(op, average)
    if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        return [
            allreduce(
                tensor,
                None,
                device_dense,
                device_sparse,
                compression,
                op,
                prescale_factor,
                postscale_factor,
                name and f"{name}.{index}",
                process_set,
            )
            for index, tensor in enumerate(tensors)
        ]
    scale = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return _reduced("grouped_allreduce", tensors, op, name, process_set, compression, scale)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor with Average or Sum over all ranks, and return this rank's share of its first dimension.

    If rows cannot be shared out equally, the first ranks get one more. The arguments are those of `allreduce`.
    """
    scale = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return _reduced("reducescatter", [tensor], op, name, process_set, compression, scale)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce tensors and share each out when all ranks have all of them; see `reducescatter`."""
    scale = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return _reduced("grouped_reducescatter", tensors, op, name, process_set, compression, scale)


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Concatenate the tensors of all ranks along the first dimension, in rank order.

    Args:
        tensor: of the same type and shape on all ranks but for the first dimension.
        name: of the operation.
        ignore_name_scope: accepted.
        process_set: who takes part.

    Returns:
        A tensor whose first dimension is the sum of all. The gradient is the average over the ranks.

    Raises:
        HorovodInternalError: the ranks disagree, or a rank is gone.
    """
    return _gathered("allgather", [tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Concatenate each tensor with those of all ranks when all have all of them; see `allgather`."""
    return _gathered("grouped_allgather", tensors, name, process_set)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensor of one rank.

    Args:
        tensor: of the same shape and type on all ranks.
        root_rank: the global rank whose tensor it is.
        name: of the operation.
        ignore_name_scope: accepted.
        process_set: who takes part; the root does.

    Raises:
        HorovodInternalError: the ranks disagree, or a rank is gone.
        ValueError: the root does not belong to `process_set`.
    """

    def gradient(_: Any, __: Any, grads: Sequence[Any]) -> list[Any]:
        total = allreduce(grads[0], op=Average, process_set=process_set)
        if process.rank() == root_rank:
            return [total]
        with tf.control_dependencies([total]):  # takes part, although it needs no result
            return [tf.zeros_like(total)]

    op = _one(engine.broadcast, root_rank=root_rank)
    return _done(op, [tensor], name or traced_name("broadcast"), process_set, _same, gradient)[0]


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Give all ranks the root's variables, in place, and return them; in a graph, tensors of their new values."""
    variables = list(variables)
    values = broadcast_all(variables, root_rank, name or "broadcast_", process_set)
    return variables if tf.executing_eagerly() else values


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a part of the first dimension to each rank, and receive one from each.

    Args:
        tensor: of the same type and shape on all ranks but for the first dimension.
        splits: how many rows each rank gets, in rank order, as int32; equal parts by default.
        name: of the operation.
        ignore_name_scope: accepted.
        process_set: who takes part.

    Returns:
        What came, in rank order; with `splits`, also the number of rows that came from each rank.

    Raises:
        HorovodInternalError: the ranks disagree, or a rank is gone.
        ValueError: `splits` does not fit the tensor and the ranks.
    """
    given = [] if splits is None else [tf.convert_to_tensor(splits)]
    count = process_set.size()

    def exchanged(tensors: Sequence[torch.Tensor], **options: Any) -> list[torch.Tensor]:
        own, *parts = tensors
        if not parts and own.dim() and len(own) % count == 0:
            parts = [torch.full((count,), len(own) // count, dtype=torch.int32)]
        return list(engine.alltoall(own, parts[0] if parts else None, **options))

    def results(tensors: Sequence[Any]) -> list[tuple[Any, Any]]:
        return [_rows_of(tensors[0]), (tf.int32, [count])]

    def gradient(tensors: Sequence[Any], made: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
        back, _ = alltoall(grads[0], made[1], process_set=process_set)
        missing = tf.shape(tensors[0])[:1] - tf.shape(back)[:1]  # rows that were not sent
        zeros = tf.zeros(tf.concat([missing, tf.shape(back)[1:]], 0), back.dtype)
        return [tf.concat([back, zeros], 0), *[None for _ in given]]

    made = _done(exchanged, [tensor, *given], name or traced_name("alltoall"), process_set, results, gradient)
    return tuple(made) if given else made[0]


def join(device: int = -1) -> Any:
    """Take part with zeros in the allreduces of the other ranks, until all have joined; in a graph, an operation.

    Args:
        device: accepted.

    Returns:
        The rank that joined last, a scalar of int32.
    """
    if tf.executing_eagerly():
        return tf.constant(engine.join(), tf.int32)
    return tf.numpy_function(lambda: np.int32(engine.join()), [], tf.int32)


def barrier(process_set: ProcessSet = global_process_set) -> Any:
    """Wait until all ranks have come here; in a graph, the operation that does it."""
    if tf.executing_eagerly():
        return engine.barrier(process_set)
    return tf.numpy_function(lambda: engine.barrier(process_set), [], [])


# fmt: on


def reduce_all(
    grads: Sequence[Any],  # what is None stays None
    names: Sequence[str | None],
    op: int,
    process_set: ProcessSet,
    *,
    compression: type[Compressor] = Compression.none,
    prescale: float = 1.0,
    postscale: float = 1.0,
    groups: Sequence[Sequence[int]] = (),  # positions of tensors that are reduced when all ranks have all of them
    compare: ComparedVariables | None = None,
) -> list[Any]:
    """Reduce tensors and IndexedSlices by name, in one node of the graph. It has no gradient."""
    grouped = {index for group in groups for index in group}
    dense = [index for index, grad in enumerate(grads) if grad is not None and not isinstance(grad, tf.IndexedSlices)]
    sparse = [index for index, grad in enumerate(grads) if isinstance(grad, tf.IndexedSlices)]
    if sparse and op not in (Average, Sum):
        raise NotImplementedError(
            f"IndexedSlices are reduced with Average or Sum, not with {OP_NAMES[op]}; use tf.convert_to_tensor"
        )
    units = [[index for index in group if index in dense] for group in groups]
    units = [*filter(None, units), *[[index] for index in dense if index not in grouped]]
    reduced = partial(
        engine.grouped_allreduce_async, op=op, prescale_factor=prescale, postscale_factor=postscale,
        process_set=process_set,
    )  # fmt: skip
    gathered = partial(engine.grouped_allgather_async, process_set=process_set)
    starts = [(len(unit), partial(reduced, name=names[unit[0]])) for unit in units]
    starts += [(2, partial(gathered, name=names[index])) for index in sparse]
    tensors, contexts = [], []
    for index in itertools.chain(*units):
        small, context = compression.compress(tf.convert_to_tensor(grads[index]))
        tensors.append(small)
        contexts.append(context)
    results = _same(tensors)
    for index in sparse:
        pair = grads[index].values, grads[index].indices
        tensors += pair
        results += map(_rows_of, pair)

    sources = [] if compare is None else compare.sources()

    def work(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if compare is not None:
            compare.look(parts[len(tensors) :])
        rest = iter(parts)
        handles = [start(list(itertools.islice(rest, count))) for count, start in starts]
        return [result for handle in handles for result in engine.synchronize(handle)]

    made = iter(collective(work, [*tensors, *sources], results))
    outputs: list[Any] = [None] * len(grads)
    for index, context in zip(itertools.chain(*units), contexts, strict=True):
        outputs[index] = compression.decompress(next(made), context)
    for index in sparse:
        values, indices = next(made), next(made)
        if op == Average:
            values = values / tf.cast(process_set.size(), values.dtype)
        outputs[index] = tf.IndexedSlices(values, indices, grads[index].dense_shape)
    return outputs


def broadcast_all(variables: Iterable[Any], root_rank: int, name: str, process_set: ProcessSet) -> list[Any]:
    """Give all ranks the root's variables, in place, in one node of the graph; returns their new values."""
    variables = list(variables)
    named = traced_name(name) or name

    def work(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        begins_anew(process_set)
        handles = [
            engine.broadcast_async(part, root_rank, f"{named}.{index}", process_set) for index, part in enumerate(parts)
        ]
        return [engine.synchronize(handle) for handle in handles]

    tensors = [tf.convert_to_tensor(variable) for variable in variables]
    made = collective(work, tensors, _same(tensors)) if tensors else []
    if process.rank() == root_rank:
        return made
    assigned = [variable.assign(result) for variable, result in zip(variables, made, strict=True)]
    with tf.control_dependencies([] if tf.executing_eagerly() else [tf.group(*assigned)]):
        return [tf.identity(result) for result in made]


# -- with gradients ----------------------------------------------------------------------------------------------------


def _done(
    op: Callable[..., Sequence[torch.Tensor]],
    tensors: Sequence[Any],
    name: str | None,
    process_set: ProcessSet,
    results: Callable[[Sequence[Any]], list[tuple[Any, Any]]],  # dtype and static shape of each, from the tensors
    gradient: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]],  # of tensors, results, gradients
) -> list[Any]:
    """Do an operation of the PyTorch API."""
    work = partial(op, name=name, process_set=process_set)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(*tensors: Any) -> Any:
        made = collective(work, tensors, results(tensors))
        return made, lambda *grads: gradient(tensors, made, grads)

    return list(run(*[tf.convert_to_tensor(tensor) for tensor in tensors]))


def _one(do: Callable[..., torch.Tensor], /, **arguments: Any) -> Callable[..., list[torch.Tensor]]:
    """An operation on one tensor, as one on a list."""
    return lambda tensors, **options: [do(tensors[0], **arguments, **options)]


def _reduced(
    kind: str, tensors: Sequence[Any], op: int, name: str | None, process_set: ProcessSet,
    compression: type[Compressor], scale: dict[str, float],
) -> list[Any]:  # fmt: skip
    check_adasum(op, process_set)
    if not tensors:
        return []
    do = getattr(engine, kind)
    done = partial(do, op=op, **scale) if kind.startswith("grouped") else _one(do, op=op, **scale)
    scatters = kind.endswith("reducescatter")

    def gradient(_: Any, __: Any, grads: Sequence[Any]) -> list[Any]:
        if not scatters:
            return _reduced(kind, grads, op, None, process_set, compression, scale)
        factor = (process_set.size() if op == Sum else 1) * scale["prescale_factor"] * scale["postscale_factor"]
        return grouped_allgather([grad * tf.cast(factor, grad.dtype) for grad in grads], process_set=process_set)

    small, contexts = zip(*[compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors], strict=True)
    results = (lambda each: list(map(_rows_of, each))) if scatters else _same
    made = _done(done, small, name or traced_name(kind), process_set, results, gradient)
    return list(map(compression.decompress, made, contexts))


def _gathered(kind: str, tensors: Sequence[Any], name: str | None, process_set: ProcessSet) -> list[Any]:
    def gradient(tensors: Sequence[Any], _: Any, grads: Sequence[Any]) -> list[Any]:
        total = grouped_allreduce(list(grads), op=Average, process_set=process_set)
        own = tf.stack([tf.shape(tensor)[0] for tensor in tensors])
        before = tf.reduce_sum(allgather(own[None], process_set=process_set)[: process_set.rank()], 0)
        return [grad[before[index] : before[index] + own[index]] for index, grad in enumerate(total)]

    do = getattr(engine, kind)
    done = do if kind.startswith("grouped") else _one(do)
    return _done(
        done, tensors, name or traced_name(kind), process_set, lambda each: list(map(_rows_of, each)), gradient
    )


def _same(tensors: Sequence[Any]) -> list[tuple[Any, Any]]:
    return [(tensor.dtype, tensor.shape) for tensor in tensors]


def _rows_of(tensor: Any) -> tuple[Any, Any]:
    """Dtype and shape of a result that has another number of rows."""
    return tensor.dtype, tf.TensorShape([None]).concatenate(tensor.shape[1:]) if tensor.shape.rank else None


# -- as operations of a graph ------------------------------------------------------------------------------------------


def _query(ask: Callable[..., int], doc: str) -> Callable[..., Any]:

    def op(process_set_id: int = 0, name: str | None = None) -> Any:
        where = process_set_by_id(process_set_id)
        return tf.numpy_function(lambda: np.int32(ask(where)), [], tf.int32, name=name)

    op.__doc__ = doc
    return op


size_op = _query(lambda where: where.size(), "The number of ranks of a process set, when the operation runs.")
process_set_included_op = _query(lambda where: where.included(), "1 if this rank belongs to a process set, else 0.")
rank_op = _query(lambda _: process.rank(), "This rank, when the operation runs.")
local_rank_op = _query(lambda _: process.local_rank(), "The position among the ranks of this machine.")
local_size_op = _query(lambda _: process.local_size(), "The number of ranks of this machine.")
