"""The Keras API: `import horovod.tensorflow.keras as hvd`, or `import horovod.keras as hvd`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from paceline.horovod import tensorflow as hvd
from paceline.horovod.tensorflow import (
    Compression,
    allgather_object,
    broadcast_object,
    broadcast_variables,
    process_set_by_id,
    process_sets,
)
from paceline.horovod.tensorflow.compression import Compressor
from paceline.horovod.tensorflow.gradients import local_variables
from paceline.horovod.tensorflow.mpi_ops import *  # noqa: F403
from paceline.horovod.tensorflow.mpi_ops import (
    Average,
    ProcessSet,
    global_process_set,
)
from paceline.horovod.tensorflow.mpi_ops import __all__ as _operations

from . import callbacks, elastic
from .optimizer import distributed

__all__ = [  # noqa: PLE0604
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "load_model",
    "process_set_by_id",
    "process_sets",
    *_operations,
]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer of Keras apply the gradients of all ranks; see `horovod.tensorflow.DistributedOptimizer`."""
    return hvd.DistributedOptimizer(
        optimizer, name, False, device_dense, device_sparse, compression, sparse_as_dense, backward_passes_per_step,
        op, gradient_predivide_factor, average_aggregated_gradients, num_groups, groups, process_set,
        scale_local_gradients,
    )  # fmt: skip


def PartialDistributedOptimizer(optimizer: Any, *args: Any, local_layers: Any = (), **kwargs: Any) -> Any:
    """A `DistributedOptimizer` that does not reduce the gradients of some layers' variables."""
    made = DistributedOptimizer(optimizer, *args, **kwargs)
    for variable in local_variables(local_layers):
        made.register_local_var(variable)
    return made


def broadcast_global_variables(root_rank: int) -> None:
    """Not possible: Keras 3 has no global variables.

    Raises:
        RuntimeError: in any case.
    """
    raise RuntimeError(
        "Keras 3 has no global variables; use hvd.callbacks.BroadcastGlobalVariablesCallback(0), or "
        "hvd.broadcast_variables(model.variables, 0)"
    )


def allreduce(  # type: ignore[no-redef]  # these four take arrays, too
    value: Any, name: str | None = None, average: bool | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, op: int | None = None, compression: type[Compressor] = Compression.none,
) -> Any:  # fmt: skip
    """Reduce a value over all ranks: an array, if it is none of TensorFlow; see `horovod.tensorflow.allreduce`."""
    made = hvd.allreduce(
        tf.convert_to_tensor(value), average, compression=compression, op=op, prescale_factor=prescale_factor,
        postscale_factor=postscale_factor, name=name,
    )  # fmt: skip
    return _like(value, made)


def allgather(value: Any, name: str | None = None) -> Any:  # type: ignore[no-redef]
    """Concatenate the values of all ranks; see `horovod.tensorflow.allgather`."""
    return _like(value, hvd.allgather(tf.convert_to_tensor(value), name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:  # type: ignore[no-redef]
    """The value of one rank; see `horovod.tensorflow.broadcast`."""
    return _like(value, hvd.broadcast(tf.convert_to_tensor(value), root_rank, name))


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:  # type: ignore[no-redef]
    """This rank's share of the reduced values; see `horovod.tensorflow.reducescatter`."""
    return _like(value, hvd.reducescatter(tf.convert_to_tensor(value), op=op, name=name))


def _like(value: Any, made: Any) -> Any:
    return made if tf.is_tensor(value) or not tf.executing_eagerly() else made.numpy()


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """Load a model of Keras, and make its optimizer apply the gradients of all ranks.

    Args:
        filepath: of `model.save`.
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: other classes and functions that Keras does not know, by name.
        compression: how gradients are made smaller for sending.
    """
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if model.optimizer is not None:
        reduction = hvd.gradients.Reduction("DistributedOptimizer", compression)
        distributed(model.optimizer, reduction, hvd.gradients.Passes(1, False))
    return model
