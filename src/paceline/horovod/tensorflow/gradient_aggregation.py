"""Gradients that are added over several passes, under Horovod's names for scripts that use them directly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from paceline.horovod.common.process_sets import ProcessSet, global_process_set

from .gradients import Passes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class LocalGradientAggregationHelper:
    """Adds gradients over several passes, and reduces them in the last one.

    Args:
        backward_passes_per_step: number of passes.
        allreduce_func: is called as `allreduce_func(gradients, variables)`, and returns those of all ranks.
        sparse_as_dense: accepted; gradients are added as dense ones.
        average_aggregated_gradients: divide the sums by the number of passes.
        rank, optimizer_type, process_set, scale_local_gradients: accepted.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[..., Any],
        sparse_as_dense: bool = False,
        average_aggregated_gradients: bool = False,
        rank: int = 0,
        optimizer_type: int = 0,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        self._passes = Passes(backward_passes_per_step, average_aggregated_gradients)
        self._reduce = allreduce_func
        self._is_last: Any = None

    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Those of all ranks in the last pass, else zeros."""
        self._is_last, made = self._passes.reduced(lambda few, those, _: self._reduce(few, those), grads, vars)
        return made

    def apply_gradients(self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `apply_grads_closure` in the last pass; in the others, count one more step of the optimizer."""
        iterations = getattr(optimizer, "iterations", None)
        rest = tf.no_op if iterations is None else lambda: iterations.assign_add(1)
        return tf.cond(self._is_last, lambda: tf.group(apply_grads_closure()), lambda: tf.group(rest()))
