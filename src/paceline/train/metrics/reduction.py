"""Means of logged values over steps and ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from paceline.train.group.group import Group


class LogMismatch(RuntimeError):
    """The ranks have logged different names; raised on all of them."""

    __module__ = "paceline"  # where users find it


class Sum:
    """The weighted sum of the values of one name. Tensors are summed on their device, without waiting for it."""

    def __init__(self) -> None:
        self.weight = 0.0
        self._number = 0.0
        self._tensor: torch.Tensor | None = None

    def add(self, value: torch.Tensor | float, weight: float) -> None:
        if not weight:
            return  # with weight 0, not even NaN counts
        self.weight += weight
        if not isinstance(value, torch.Tensor):
            self._number += float(value) * weight
            return
        scalar = value.detach()
        if scalar.dim():
            scalar = scalar.reshape(())
        if self._tensor is None:
            self._tensor = scalar.to(torch.float64) * weight
            return
        if scalar.device != self._tensor.device:
            scalar = scalar.to(self._tensor.device)
        self._tensor = self._tensor.add(scalar, alpha=weight)

    def tensor(self, device: torch.device) -> torch.Tensor:
        if self._tensor is None:
            return torch.tensor(self._number, dtype=torch.float64, device=device)
        return self._tensor.to(device) + self._number


class Span(NamedTuple):
    """Consecutive steps: their number, and the epoch and the step of the first and the last."""

    steps: int
    first: tuple[int, int]
    last: tuple[int, int]


class Reduction:
    """A reduction to means over ranks, which runs while the training continues.

    The names that all ranks know determine the shape of the reduced tensor. Its first element is the number of ranks
    that have logged other names. If there are any, or if only some ranks have logged a name, the ranks must compare
    what they have logged.
    """

    def __init__(
        self,
        group: Group,
        names: list[str],
        *,
        values: dict[str, tuple[float, float, float]],
        costs: list[float],
        span: Span,
    ) -> None:
        self._group = group
        self._names = names
        self._costs = costs
        self.values = values
        self.span = span
        new = float(not values.keys() <= set(names))
        local = [new, *costs, *(x for name in names for x in values.get(name, (0.0, 0.0, 0.0)))]
        self._reduced = group.start_all_reduce(torch.tensor(local, dtype=torch.float64))
        self._result: list[float] = []

    def again(self, names: list[str]) -> Reduction:
        """The same with other names."""
        return Reduction(self._group, names, values=self.values, costs=self._costs, span=self.span)

    def is_complete(self) -> bool:
        """Whether all ranks have logged the same known names; waits for the reduction."""
        return self._completes(self._reduced())

    def is_there(self) -> bool:
        """The same without waiting: False if the result is not there. Any rank may call it."""
        reduced = self._reduced.peek()
        return reduced is not None and self._completes(reduced)

    def _completes(self, reduced: torch.Tensor) -> bool:
        self._result = reduced.tolist()
        return not self._result[0] and all(count in (0, self._group.world_size) for count in self._of_names(2))

    def results(self) -> tuple[dict[str, float], list[float]]:
        """Means of the logged values, and of the costs, over all ranks."""
        means = {n: t / w for n, t, w in zip(self._names, self._of_names(0), self._of_names(1), strict=True) if w}
        return means, [x / self._group.world_size for x in self._result[1 : 1 + len(self._costs)]]

    def _of_names(self, which: int) -> list[float]:
        return self._result[1 + len(self._costs) + which :: 3]
