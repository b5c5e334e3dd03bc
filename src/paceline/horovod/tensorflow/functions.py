"""Giving all ranks the same variables and objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import tensorflow as tf

from paceline.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.horovod.torch import functions

from .mpi_ops import broadcast_all

T = TypeVar("T")


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Give all ranks the root's variables, in place.

    Args:
        variables: of TensorFlow or Keras, in the same order on all ranks.
        root_rank: the global rank whose variables they are.
        process_set: who takes part.
        inplace: accepted.

    Returns:
        In a graph the operation that does it, else None.

    Raises:
        HorovodInternalError: the ranks have different variables, or a rank is gone.
    """
    values = broadcast_all(variables, root_rank, "broadcast_variables", process_set)
    return None if tf.executing_eagerly() else tf.group(*values)


def broadcast_global_variables(root_rank: int) -> Any:
    """The operation that gives all ranks the root's global variables, in a graph of `tf.compat.v1`.

    Raises:
        RuntimeError: eager execution has no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError("hvd.broadcast_global_variables() needs a graph; use hvd.broadcast_variables(variables, 0)")
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Gives all ranks the root's global variables when a session begins: after initialisation, or a checkpoint.

    Args:
        root_rank: the global rank whose variables they are.
        device: accepted.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self._root_rank = root_rank
        self._operation: Any = None

    def begin(self) -> None:
        """Add the operation to the graph."""
        if self._operation is None or self._operation.graph is not tf.compat.v1.get_default_graph():
            self._operation = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Do it."""
        session.run(self._operation)


def broadcast_object(
    obj: T, root_rank: int = 0, session: Any = None, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T:  # fmt: skip
    """Return the object of the root; it is pickled, by cloudpickle where that is installed.

    Args:
        obj: passed on the root.
        root_rank: the global rank whose object it is.
        session: accepted; not needed.
        name: of the operation.
        process_set: who takes part.

    Raises:
        HorovodInternalError: a rank is gone.
    """
    return functions.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """A function that does `broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: T, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[T]:
    """Return the objects of all ranks, in rank order; the arguments are those of `broadcast_object`."""
    return functions.allgather_object(obj, name, process_set)
