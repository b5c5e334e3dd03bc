"""How many steps ranks train alone in LocalSGD."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from paceline.train.parallel.sync.options import MOST_LOCAL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.train.parallel.sync.options import LocalSGD


class Pace:
    """How many steps lie between two averages; see `LocalSGD.every`.

    Attributes:
        adapts: whether the number of steps depends on the loss.
        every: their number now.
    """

    def __init__(self, options: LocalSGD) -> None:
        self.adapts = options.every == "auto"
        self._initial = options.initial
        self.every = options.initial if isinstance(options.every, str) else options.every
        self._first: tuple[float, float] | None = None  # loss and learning rate until the first average
        self._sum: torch.Tensor | None = None
        self._count = 0

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a batch of this rank."""
        if self.adapts:
            own = loss.detach().float().reshape(1)
            self._sum = own.clone() if self._sum is None else self._sum + own
            self._count += 1

    @property
    def loss(self) -> torch.Tensor:
        """The mean loss of this rank since the last average, of shape [1]."""
        return torch.zeros(1) if self._sum is None else self._sum / self._count

    def adapt(self, loss: float, rate: float) -> None:
        """Set the steps until the next average, after losses with this mean over all ranks, and this learning rate."""
        self._sum, self._count = None, 0
        if not (loss > 0 and rate > 0 and math.isfinite(loss)):
            return
        if self._first is None:
            self._first = loss, rate
        first_loss, first_rate = self._first
        ratio = first_rate * loss / (rate * first_loss)
        self.every = max(1, min(MOST_LOCAL, math.ceil(math.sqrt(ratio * self._initial))))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        total = None if self._sum is None else self._sum.clone()
        return {"every": self.every, "first": self._first, "sum": total, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on."""
        self.every, self._first = state["every"], state["first"]
        self._sum, self._count = state["sum"], state["count"]
