"""What an optimizer has that is the same on all ranks: the parameters that it trains, and its numbers."""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .checksums import Sums, is_comparable, unpack

if TYPE_CHECKING:
    from collections.abc import Callable

    from .judging import Kind, Part


class Label(NamedTuple):
    """What something is: a parameter by the numbers of its group and in it, or what is kept under a key for that.

    `index` is -1 for what is of the whole group.
    """

    kind: Kind
    group: int
    index: int
    key: str


class Contents:
    """What an optimizer has at a moment.

    Args:
        optimizer: whose groups' parameters are summed.
        alike: whether its numbers and those of its state are the same on all ranks, too.
        count: of its steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, count: int, *, alike: bool) -> None:
        self._labels: list[Label] = []
        self._numbers: list[tuple[Label, str]] = [(Label("number", -1, -1, "steps"), f"{count}")]
        tensors: list[torch.Tensor] = []
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.requires_grad and is_comparable(parameter):
                    self._labels.append(Label("parameter", number, index, ""))
                    tensors.append(parameter)
            if not alike:
                continue
            self._add_numbers(group, tensors, number, -1, dimensions=True)
            for index, parameter in enumerate(group["params"]):
                state = optimizer.state.get(parameter)
                if isinstance(state, Mapping):
                    self._add_numbers(state, tensors, number, index, dimensions=False)
        self.sums = Sums(tensors)

    def _add_numbers(
        self, values: Mapping[Any, Any], tensors: list[torch.Tensor], group: int, index: int, *, dimensions: bool
    ) -> None:
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                if (dimensions or not value.dim()) and is_comparable(value):
                    self._labels.append(Label("number", group, index, str(key)))
                    tensors.append(value)
            elif key != "params" and _is_plain(value):
                self._numbers.append((Label("number", group, index, str(key)), repr(value)))

    @property
    def digest(self) -> str:
        """A digest of all; waits for a GPU."""
        texts = repr([text for _, text in self._numbers]).encode()
        return hashlib.blake2b(self.sums.packed + texts, digest_size=16).hexdigest()

    def parts(self, name: Callable[[Label], str]) -> list[Part]:
        """What exactly it has.

        Args:
            name: the name of something, as users know it.
        """
        packed = self.sums.packed
        found: list[Part] = [(label.kind, name(label), text) for label, text in self._numbers]
        for number, label in enumerate(self._labels):
            found.append((label.kind, name(label), (*unpack(packed, number), self.sums.sizes[number])))
        return found


def _is_plain(value: Any) -> bool:
    """Whether something is a number, or made of numbers, so that its text says what it is."""
    if isinstance(value, (tuple, list)):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, numbers.Number)
