"""From tensors of TensorFlow to operations of the engine, and back: in eager mode, in `tf.function` and in graphs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf
import torch
from tensorflow.python.autograph.core import config
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from paceline.horovod.common.exceptions import HorovodInternalError

Start = Callable[[torch.Tensor], Any]  # starts an operation, and returns a function that waits for its results

# What these functions do in a graph is decided when it is built.
config.CONVERSION_RULES = (config.DoNotConvert("paceline"), *config.CONVERSION_RULES)
# Memory of TensorFlow is only read here.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


class OperationFailed(HorovodInternalError, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """A collective has failed, as both Horovod's scripts and TensorFlow's expect it."""

    def __init__(self, why: str) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, why)


class OperationRefused(ValueError, tf.errors.InvalidArgumentError):  # type: ignore[misc]
    """A collective cannot be begun with these arguments, as both Python's scripts and TensorFlow's expect it."""

    def __init__(self, why: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, why)


def collective(
    work: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    tensors: Sequence[Any],
    results: Sequence[tuple[Any, Any]],
) -> list[Any]:
    """Do a collective with tensors of TensorFlow, in one node of the graph if there is a graph.

    Args:
        work: does it; its tensors share the memory of those of TensorFlow, and must not be changed.
        tensors: what it is called with.
        results: dtype and static shape of each result.

    Raises:
        HorovodInternalError: the ranks disagree, or a rank is gone. In a graph it is the error of TensorFlow that names
            this one.
        ValueError: the arguments do not fit; it is an InvalidArgumentError of TensorFlow too, and in a graph only that.
        NotImplementedError: XLA compiles this function.
    """

    def with_arrays(*arrays: Any) -> list[Any]:
        return [_array(tensor) for tensor in work([_tensor(array) for array in arrays])]

    if tf.executing_eagerly():
        try:
            made = with_arrays(*[tensor._numpy() for tensor in tensors])
        except HorovodInternalError as error:
            raise OperationFailed(str(error)) from error
        except ValueError as error:
            raise OperationRefused(str(error)) from error
        return [tf.convert_to_tensor(array, dtype) for array, (dtype, _) in zip(made, results, strict=True)]
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise NotImplementedError(
            "XLA cannot compile Horovod's collectives; pass jit_compile=False to compile() or tf.function"
        )
    return _node(with_arrays, list(tensors), *zip(*results, strict=True))


def _node(work: Callable[..., Any], tensors: list[Any], dtypes: Sequence[Any], shapes: Sequence[Any]) -> list[Any]:
    """A node of the graph that calls a function with arrays, and occupies no thread of TensorFlow meanwhile.

    A function in Python blocks a thread, and `tf.function` orders such functions: with few threads, or other orders on
    other ranks, collectives would wait for each other for ever. A dataset calls it in a thread of its own.
    """
    call = tf.function(lambda *parts: tf.numpy_function(work, parts, dtypes), autograph=False)
    given = {"output_types": dtypes, "output_shapes": shapes}
    source = tf.raw_ops.TensorDataset(components=tensors, output_shapes=[tensor.shape for tensor in tensors])
    mapped = tf.raw_ops.MapDataset(
        input_dataset=source, other_arguments=[], use_inter_op_parallelism=False, **given,
        f=call.get_concrete_function(*[tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]),
    )  # fmt: skip
    made = tf.raw_ops.DatasetToSingleElement(dataset=mapped, **given)
    order = getattr(made[0].graph, "experimental_acd_manager", None)
    if order is not None:
        order.run_independently(source.op)
        order.run_independently(made[0].op)
    return list(made)


def traced_name(name: str) -> str | None:
    """A name for an operation that has none: in a graph, the same on all ranks that build the same graph."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, "_paceline_counts"):
        graph._paceline_counts = {}
    counts = graph._paceline_counts
    counts[name] = counts.get(name, -1) + 1
    function = re.sub(r"_\d+$", "", getattr(graph, "name", "graph"))
    return f"{function}.{name}.{counts[name]}"


def tensor_of(tensor: Any) -> torch.Tensor:
    """A tensor of eager mode that shares its memory."""
    return _tensor(tensor._numpy())


def _tensor(array: Any) -> torch.Tensor:
    array = np.asarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
