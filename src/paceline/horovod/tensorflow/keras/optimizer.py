"""An optimizer of Keras that applies the gradients of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from paceline.horovod.tensorflow.gradients import Passes, Reduction
from paceline.horovod.tensorflow.mpi_ops import Adasum


def distributed(optimizer: Any, reduction: Reduction, passes: Passes) -> Any:
    """Make an optimizer of Keras apply the gradients of all ranks, and return it.

    It keeps its name, configuration and variables, so a saved model has an ordinary optimizer.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} is no optimizer of Keras 3 or of tf.compat.v1.train; pass one of these"
        )
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            f"horovod.keras needs Keras on TensorFlow, not on {keras.backend.backend()}; set KERAS_BACKEND=tensorflow"
        )
    if isinstance(optimizer, _Methods):
        raise ValueError(f"this {type(optimizer).__name__} is distributed already; wrap an optimizer once")
    if reduction.op == Adasum:
        raise ValueError("op=Adasum is not supported with Keras; use Average or Sum")
    own = type(optimizer)
    kind = type(
        own.__name__, (_Methods, own), {"__module__": own.__module__, "_reduction": reduction, "_passes": passes}
    )
    optimizer.__class__ = kind
    return optimizer


class _Methods:
    """What the class that `distributed` makes has besides the methods of the optimizer's own class."""

    _reduction: Reduction
    _passes: Passes

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradient of a variable."""
        self._reduction.local.add(id(var))

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Apply the gradients of all ranks; those of several passes after the last."""
        grads = list(grads)
        optimizer: Any = self
        variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
        apply = super().apply  # type: ignore[misc]
        if self._passes.count == 1:
            return apply(self._reduction(grads, variables, self), trainable_variables)
        if not optimizer.built:
            with tf.init_scope():
                optimizer.build(variables)
        is_last, grads = self._passes.reduced(self._reduction, grads, variables, self)

        def step() -> Any:
            apply(grads, trainable_variables)
            return tf.constant(True)

        def skip() -> Any:
            optimizer.iterations.assign_add(1)  # a schedule of the learning rate counts passes, as with Horovod
            return tf.constant(False)

        return tf.cond(is_last, step, skip)


def _with_horovod(compile_model: Callable[..., Any]) -> Callable[..., Any]:
    """`compile` as scripts of Horovod call it.

    They pass an argument, as its documentation says, that Keras 3 no longer has. With mixed_float16 Keras puts a
    LossScaleOptimizer around the optimizer, which skips steps whose gradients are not finite: that one must be
    distributed, so that all ranks skip the same steps.
    """

    @functools.wraps(compile_model)
    def compiling(self: Any, *args: Any, experimental_run_tf_function: bool = False, **kwargs: Any) -> Any:
        made = compile_model(self, *args, **kwargs)
        inner = getattr(self.optimizer, "inner_optimizer", None)
        if isinstance(inner, _Methods):
            reduction, passes = inner._reduction, inner._passes
            inner.__class__ = type(inner).__mro__[2]
            distributed(self.optimizer, reduction, passes)
        return made

    return compiling


# The method is replaced where it is defined, as Keras asks of a loaded model whether it is that one.
_trainer = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
_trainer.compile = _with_horovod(_trainer.compile)
