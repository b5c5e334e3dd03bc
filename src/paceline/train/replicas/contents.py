"""What an optimizer has that is the same on all ranks: the parameters that it trains, and its numbers."""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .checksums import Sums, is_comparable, unpack

if TYPE_CHECKING:
    from collections.abc import Callable

    from .judging import Kind, Part


class Label(NamedTuple):
    """What something is.

    Attributes:
        kind: of it.
        group: number of the optimizer's group; -1 for what is of all, and in a state that a checkpoint holds.
        place: number of a parameter in its group, or in a checkpoint of all; -1 for what is of none.
        key: under which it is kept for a parameter or a group; of a model's parameter its name.
        part: of a checkpoint.
    """

    kind: Kind
    group: int
    place: int
    key: str
    part: str = ""


class Contents:
    """What a rank has at a moment: tensors and numbers; `seal` begins to sum.

    Attributes:
        sums: of the tensors.
    """

    sums: Sums

    def __init__(self) -> None:
        self._labels: list[Label] = []
        self._tensors: list[torch.Tensor] = []
        self._numbers: list[tuple[Label, str]] = []

    def add_parameter(self, label: Label, parameter: torch.Tensor) -> None:
        """Add a parameter."""
        if is_comparable(parameter):
            self._labels.append(label)
            self._tensors.append(parameter)

    def add(self, values: Mapping[Any, Any], group: int, place: int, part: str = "", *, dimensions: bool) -> None:
        """Add what is kept for a group or a parameter, without parameters."""
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                if (dimensions or not value.dim()) and is_comparable(value):
                    kind: Kind = "state" if value.dim() and place >= 0 else "number"
                    self._labels.append(Label(kind, group, place, str(key), part))
                    self._tensors.append(value)
            elif key != "params" and _is_plain(value):
                self._numbers.append((Label("number", group, place, str(key), part), repr(value)))

    def seal(self) -> Contents:
        """Begin to sum what was added, which may change afterwards."""
        self.sums = Sums(self._tensors)
        self._tensors = []
        return self

    @property
    def digest(self) -> str:
        """A digest of all; waits for a GPU."""
        texts = repr([text for _, text in self._numbers]).encode()
        return hashlib.blake2b(self.sums.packed + texts, digest_size=16).hexdigest()

    def parts(self, name: Callable[[Label], str]) -> list[Part]:
        """What exactly it is."""
        packed = self.sums.packed
        found: list[Part] = [(label.kind, name(label), text) for label, text in self._numbers]
        for number, label in enumerate(self._labels):
            found.append((label.kind, name(label), (*unpack(packed, number), self.sums.sizes[number])))
        return found


def of_optimizer(
    optimizer: torch.optim.Optimizer,
    count: int,
    *,
    alike: bool,
    is_common: Callable[[torch.Tensor], bool] = lambda _: True,
) -> Contents:
    """The parameters that an optimizer trains after `count` steps, and its numbers if they are to be alike.

    Only those are compared that all ranks have, as `is_common` says.
    """
    found = Contents()
    found.add({"steps": count}, -1, -1, dimensions=False)
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter.requires_grad and is_common(parameter):
                found.add_parameter(Label("parameter", number, place, ""), parameter)
        if not alike:
            continue
        found.add(group, number, -1, dimensions=True)
        for place, parameter in enumerate(group["params"]):
            state = optimizer.state.get(parameter)
            if isinstance(state, Mapping) and is_common(parameter):
                found.add(state, number, place, dimensions=False)
    return found.seal()


def of_states(states: Mapping[str, Any], parameters: Mapping[str, AbstractSet[str]]) -> Contents:
    """What is compared of the states of models and optimizers."""
    found = Contents()
    for part, state in states.items():
        if part in parameters:
            for name, value in state.items():
                if name in parameters[part] and isinstance(value, torch.Tensor):
                    found.add_parameter(Label("parameter", -1, -1, name, part), value)
            continue
        for number, group in enumerate(state["param_groups"]):
            found.add(group, number, -1, part, dimensions=True)
        for place, kept in state["state"].items():
            if isinstance(place, int) and isinstance(kept, Mapping):
                found.add(kept, -1, place, part, dimensions=True)
    return found.seal()


def _is_plain(value: Any) -> bool:
    """Whether something is a number, or made of numbers, so that its text says what it is."""
    if isinstance(value, (tuple, list)):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, numbers.Number)
