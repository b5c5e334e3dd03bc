"""Parameters that an optimizer of the run trains, and that are in none of its models, such as weights of losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .errors import ModelMismatch
from .late_exchange import LateExchange

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.train.group.group import Group


class LooseParameters:
    """Those of one optimizer. They start with rank 0's values, their gradients are averaged, and checkpoints have them.

    A rank's loss may not depend on them, so their exchange does not wait for gradients: it belongs to each
    `Run.backward`, and to a step of the optimizer where gradients come from elsewhere.

    Attributes:
        accumulate: number of batches per step of the optimizer.
        averages: whether gradients are averaged now: the next backward pass is the last one of its accumulation.
        is_averaged: whether they were since the last step.
        late: the exchange of their gradients.
        is_expected: whether a checkpoint that is being loaded has some.
    """

    def __init__(self, group: Group, accumulate: int) -> None:
        self.accumulate, self.averages = accumulate, accumulate == 1
        self.is_averaged = self.is_expected = False
        self.late = LateExchange(group, lambda: False)
        self._group = group
        self._named: dict[str, torch.Tensor] = {}
        self._others: set[int] = set()  # of which something else in the checkpoints has the values
        self._saved: dict[str, torch.Tensor] = {}  # by a checkpoint, of groups that the script has not added yet

    def hold(self, named: Mapping[str, torch.Tensor]) -> None:
        """Make these, by their names, the parameters. New ones get the values of the checkpoint, or of rank 0."""
        new = {name: each for name, each in named.items() if self._named.get(name) is not each}
        self._named = dict(named)
        for each in new.values():
            each.data = each.data.to(self._group.device)
        self.late.parameters = list(self._named.values())
        self._load({name: self._saved.pop(name) for name in new if name in self._saved})
        if not new or self._group.world_size == 1:
            return
        mine = [(name, tuple(each.shape), str(each.dtype)) for name, each in new.items()]
        theirs = self._group.broadcast_object(mine)
        alike = self._group.gather_objects(mine == theirs)
        if not all(alike):
            raise ModelMismatch(
                f"the optimizer of rank {alike.index(False)} has other parameters than that of rank 0, beside those of "
                "the models of run.setup; give all ranks' optimizers the same"
            )
        with torch.no_grad(), self._group.guard:
            for each in new.values():
                dist.broadcast(each, 0)

    def average(self) -> None:
        """Average the gradients, on all ranks, unless more batches are to add to them."""
        if self.averages and self.late.parameters and self._group.world_size > 1:
            self.late.exchange(self.late.parameters)
            self.is_averaged = True

    def leave_to_others(self, others: set[int]) -> None:
        """Leave parameters, given by their ids, out of `state_dict`: other parts of the checkpoints have them."""
        self._others = others

    def __len__(self) -> int:
        return len(self.state_dict())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Their values by their names."""
        return {name: each.detach() for name, each in self._named.items() if id(each) not in self._others}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load values; those of parameters that the optimizer gets later wait for them."""
        self._load({name: value for name, value in state.items() if name in self._named})
        self._saved = {name: value for name, value in state.items() if name not in self._named}
        self.is_expected = False

    def _load(self, state: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in state.items():
                self._named[name].copy_(value)
