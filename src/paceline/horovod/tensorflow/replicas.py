"""What is compared of variables whose gradients are reduced."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from paceline.horovod.common.process import engine
from paceline.horovod.engine.replicas import Compared
from paceline.train.replicas.contents import Contents, Label

from .bridge import tensor_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

_all: dict[tuple[int, ...], ComparedVariables] = {}  # by the ids of variables: tapes are made anew in each step


def comparison(variables: Sequence[Any], optimizer: Any = None) -> ComparedVariables | None:
    """What compares variables when it looks in each step, before they change; None if they cannot be read."""
    reads = "numpy" if tf.compat.v1.executing_eagerly_outside_functions() else "read_value"
    if not variables or not all(hasattr(one, "assign") and hasattr(one, reads) for one in variables):
        return None
    key = tuple(map(id, variables))
    known = _all.get(key)
    if known is None or not known.is_of(variables):
        for gone in [each for each, one in _all.items() if not one.is_there()]:
            del _all[gone]
        known = _all[key] = ComparedVariables(variables, optimizer)
    return known


class ComparedVariables(Compared):
    """Variables, and the learning rate of an optimizer of Keras if it is known."""

    def __init__(self, variables: Sequence[Any], optimizer: Any) -> None:
        super().__init__()
        self._variables = [weakref.ref(variable) for variable in variables]
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._values: Sequence[torch.Tensor] = ()

    def is_there(self) -> bool:
        return all(variable() is not None for variable in self._variables)

    def is_of(self, variables: Sequence[Any]) -> bool:
        """Whether it is of these, not of others that had their ids."""
        return all(mine() is variable for mine, variable in zip(self._variables, variables, strict=True))

    def sources(self) -> list[Any]:
        """What has the values of variables in a graph of `tf.compat.v1`, in steps that compare them; else nothing."""
        if tf.compat.v1.executing_eagerly_outside_functions():
            return []
        variables: list[Any] = [each() for each in self._variables]
        is_due = tf.numpy_function(lambda: np.array(self.is_due(engine().replicas)), [], tf.bool)
        is_due.set_shape([])
        values = tf.cond(
            is_due,
            lambda: [tf.identity(one.read_value()) for one in variables],
            lambda: [tf.zeros([0], one.dtype.base_dtype) for one in variables],
        )
        return [values] if len(variables) == 1 and not isinstance(values, list) else list(values)

    def look(self, values: Sequence[torch.Tensor]) -> None:
        """A step has ended, and the next one is about to change the variables."""
        self._values = values
        replicas = engine().replicas
        self.ends_step(replicas)
        self.begins_step(replicas)
        self._values = ()

    def contents(self, steps: int) -> Contents:
        made = Contents()
        made.add({"steps": steps, **self._rate()}, -1, -1, dimensions=False)
        values = self._values or [tensor_of(tf.convert_to_tensor(variable())) for variable in self._variables]
        for place, value in enumerate(values):
            made.add_parameter(Label("parameter", -1, place, ""), value)
        return made.seal()

    def _rate(self) -> dict[str, float]:
        """The learning rate, if it is a variable: a schedule gives all ranks the same."""
        optimizer = None if self._optimizer is None else self._optimizer()
        rate = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
        return {"lr": float(str(rate.numpy()))} if rate is not None and hasattr(rate, "assign") else {}

    def names(self) -> Callable[[Label], str]:
        variables: list[Any] = [each() for each in self._variables]
        names = [getattr(each, "path", None) or each.name.removesuffix(":0") for each in variables]
        optimizer = None if self._optimizer is None else type(self._optimizer()).__name__
        return lambda label: names[label.place] if label.place >= 0 else f"{label.key} of {optimizer or 'a tape'}"

    def shapes(self) -> str:
        variables: list[Any] = [each() for each in self._variables]
        return repr([tuple(each.shape) for each in variables])
