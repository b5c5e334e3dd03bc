"""Passes without gradients of models that ranks gather together, where they have different numbers of batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from paceline.train.parallel.nested import mapped

if TYPE_CHECKING:
    from paceline.train.group.group import Group
    from paceline.train.torch_types import Arguments

_ENDS = -1  # what a rank says that has no more batches, in place of the number of a model


class Gathered(Protocol):
    """A model whose pass is a collective."""

    def compute_again(self, given: Arguments) -> Any:
        """Compute a pass whose result is not used."""


class JointPasses:
    """Lets ranks that have computed all of their batches take part in the passes of the others.

    Before each pass, ranks tell each other of which model it is. One that has no more batches computes its last one
    again. The ranks have a process group of their own for this: a pass of one rank alone must wait, and not meet what
    the others do.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._ranks: dist.ProcessGroup | None = None
        self._models: list[Gathered] = []
        self._last: dict[int, Arguments] = {}  # of a pass of each model, by its number

    def add(self, model: Gathered) -> int:
        """Add a model, and return its number. A collective of all ranks."""
        if self._ranks is None and self._group.world_size > 1:
            self._ranks = dist.new_group()
        self._models.append(model)
        return len(self._models) - 1

    def goes_on(self, number: int, given: Arguments) -> None:
        """Say that this rank computes a pass of a model."""
        self._last[number] = given
        if self._ranks is not None and _ENDS in self._said(number):
            self._give(number)

    def finish(self) -> None:
        """Compute passes until all ranks have ended."""
        while self._ranks is not None and (number := max(self._said(_ENDS))) != _ENDS:
            self._give(number)
            self._models[number].compute_again(self._last[number])
        self._last.clear()

    def _said(self, own: int) -> list[int]:
        """What all ranks say."""
        device = self._group.device
        every = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(self._group.world_size)]
        with self._group.guard:
            dist.all_gather(every, torch.tensor([own], device=device), group=self._ranks)
        return [int(each) for each in every]

    def _give(self, number: int) -> None:
        """Give arguments to ranks that never had any for this model."""
        has = self._said(int(number in self._last))
        if all(has):
            return
        source = has.index(1)
        box = [self._last[number] if self._group.rank == source else None]
        with self._group.guard:
            dist.broadcast_object_list(box, source, group=self._ranks)
        self._last.setdefault(number, mapped(box[0], lambda each: each.to(self._group.device)))
