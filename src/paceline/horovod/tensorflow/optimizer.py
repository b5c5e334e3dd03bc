"""Optimizers that apply the gradients of all ranks: those of Keras, and of `tf.compat.v1`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from paceline.horovod.common.process_sets import ProcessSet, global_process_set

from .compression import Compression, Compressor
from .gradients import Passes, Reduction
from .mpi_ops import Adasum, Average


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer that applies the gradients of all ranks.

    Args:
        optimizer: of `tf.compat.v1.train` or Keras. One of Keras becomes distributed itself.
        name: of the optimizer of `tf.compat.v1`.
        use_locking: see `tf.compat.v1.train.Optimizer`.
        device_dense, device_sparse: accepted; collectives run on the CPU.
        compression, sparse_as_dense, op, gradient_predivide_factor, groups, process_set, scale_local_gradients: see
            `Reduction`; local variables are those given to `register_local_var`. With Adasum, an optimizer of
            `tf.compat.v1` is applied first, and the changes of all ranks are combined.
        backward_passes_per_step: number of backward passes whose gradients are accumulated.
        average_aggregated_gradients: whether these are averaged, not summed.
        num_groups: deprecated, see `groups`.

    Raises:
        ValueError: it is another kind of optimizer; or `op`, `groups`, the predivide factor or the number of passes is
            malformed.
    """
    reduction = Reduction(
        "DistributedOptimizer", compression, sparse_as_dense, op, gradient_predivide_factor, groups or num_groups,
        process_set, scale_local_gradients,
    )  # fmt: skip
    passes = Passes(backward_passes_per_step, average_aggregated_gradients)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _Optimizer(optimizer, name, use_locking, reduction, passes)
    from .keras.optimizer import distributed  # the import of Keras takes as long as that of TensorFlow

    return distributed(optimizer, reduction, passes)


class _Optimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """An optimizer of `tf.compat.v1` around another."""

    def __init__(
        self, optimizer: Any, name: str | None, use_locking: bool, reduction: Reduction, passes: Passes
    ) -> None:
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer
        self._reduction = reduction
        self._passes = passes
        self._is_last: Any = None

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradient of a variable."""
        self._reduction.local.add(id(var))

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The gradients of all ranks, with their variables."""
        grads: Any
        grads, variables = zip(*self._optimizer.compute_gradients(*args, **kwargs), strict=True)
        if self._passes.count > 1 and self._reduction.op == Adasum:
            self._is_last, grads = self._passes.add(grads, variables)
        elif self._passes.count > 1:
            self._is_last, grads = self._passes.reduced(self._reduction, grads, variables)
        elif self._reduction.op != Adasum:
            grads = self._reduction(grads, variables)
        return list(zip(grads, variables, strict=True))

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Apply gradients, those of several passes after the last; each pass is a step."""
        pairs = list(grads_and_vars)

        def apply() -> Any:
            step = self._combined if self._reduction.op == Adasum else self._optimizer.apply_gradients
            with tf.control_dependencies([it for it in [step(pairs, global_step, name)] if it is not None]):
                return tf.constant(True)

        if self._passes.count == 1:
            return apply() if tf.executing_eagerly() else apply().op

        def skip() -> Any:
            counted = [] if global_step is None else [global_step.assign_add(tf.ones([], global_step.dtype))]
            with tf.control_dependencies([] if tf.executing_eagerly() else [tf.group(*counted)]):
                return tf.constant(False)

        made = tf.cond(self._is_last, apply, skip)
        return None if tf.executing_eagerly() else made.op

    def _combined(self, pairs: list[tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
        """Apply gradients, and combine the changes of all ranks with Adasum."""
        variables = [variable for grad, variable in pairs if grad is not None]
        # A snapshot is a copy. tf.identity of a reference variable (`disable_v2_behavior`) is the variable's memory.
        before = [tf.raw_ops.Snapshot(input=variable.read_value()) for variable in variables]
        with tf.control_dependencies(before):
            step = self._optimizer.apply_gradients(pairs, *args, **kwargs)
        with tf.control_dependencies([] if step is None else [step]):
            changes = [variable.read_value() - start for variable, start in zip(variables, before, strict=True)]
            changes = self._reduction(changes, variables)
            return tf.group(
                *[
                    variable.assign(start + change)
                    for variable, start, change in zip(variables, before, changes, strict=True)
                ]
            )

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """A slot of the optimizer inside."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.variables(*args, **kwargs)
