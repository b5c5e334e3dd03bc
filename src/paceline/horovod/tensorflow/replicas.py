"""What is compared of variables whose gradients are reduced."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from paceline.horovod.common.process import engine
from paceline.horovod.engine.replicas import Compared
from paceline.train.replicas.contents import Contents, Label

from .bridge import tensor_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_all: dict[tuple[int, ...], ComparedVariables] = {}  # by the ids of variables: tapes are made anew in each step


def comparison(variables: Sequence[Any], optimizer: Any = None) -> Callable[[], None] | None:
    """What compares variables when it is called in each step, before they change; None if they cannot be read.

    Args:
        variables: those that are trained together.
        optimizer: of Keras; None if it is not known.
    """
    if not variables or not tf.compat.v1.executing_eagerly_outside_functions():
        return None
    if not all(hasattr(variable, "assign") and hasattr(variable, "numpy") for variable in variables):
        return None
    key = tuple(map(id, variables))
    known = _all.get(key)
    if known is None or not known.is_of(variables):
        for gone in [each for each, one in _all.items() if not one.is_there()]:
            del _all[gone]
        known = _all[key] = ComparedVariables(variables, optimizer)
    return known.look


class ComparedVariables(Compared):
    """Variables, and the learning rate of an optimizer of Keras if it is known."""

    def __init__(self, variables: Sequence[Any], optimizer: Any) -> None:
        super().__init__()
        self._variables = [weakref.ref(variable) for variable in variables]
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def is_there(self) -> bool:
        """Whether its variables are there."""
        return all(variable() is not None for variable in self._variables)

    def is_of(self, variables: Sequence[Any]) -> bool:
        """Whether it is of these, not of others that had their ids."""
        return all(mine() is variable for mine, variable in zip(self._variables, variables, strict=True))

    def look(self) -> None:
        """A step has ended, and the next one is about to change the variables.

        Raises:
            ReplicaMismatch: ranks differ.
        """
        replicas = engine().replicas
        self.ends_step(replicas)
        self.begins_step(replicas)

    def contents(self, steps: int) -> Contents:
        """See `Compared`."""
        made = Contents()
        made.add({"steps": steps, **self._rate()}, -1, -1, dimensions=False)
        for place, variable in enumerate(self._variables):
            made.add_parameter(Label("parameter", -1, place, ""), tensor_of(tf.convert_to_tensor(variable())))
        return made.seal()

    def _rate(self) -> dict[str, float]:
        """The learning rate, if it is a variable: a schedule gives all ranks the same."""
        optimizer = None if self._optimizer is None else self._optimizer()
        rate = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
        return {"lr": float(str(rate.numpy()))} if rate is not None and hasattr(rate, "assign") else {}

    def names(self) -> Callable[[Label], str]:
        """See `Compared`."""
        variables: list[Any] = [each() for each in self._variables]
        names = [getattr(each, "path", None) or each.name.removesuffix(":0") for each in variables]
        optimizer = None if self._optimizer is None else type(self._optimizer()).__name__
        return lambda label: names[label.place] if label.place >= 0 else f"{label.key} of {optimizer or 'a tape'}"

    def shapes(self) -> str:
        """See `Compared`."""
        variables: list[Any] = [each() for each in self._variables]
        return repr([tuple(each.shape) for each in variables])
