"""After which steps the ranks compare what they have."""

from __future__ import annotations

import time
from collections import deque

_FIRST = 5  # steps of an optimizer after each of which ranks are compared
_SHARE = 0.001  # of the time of a step that comparisons may take
_COSTS = 4  # last comparisons of which the cheapest says what one costs: other programs may hold one up


class Schedule:
    """After the first steps, and then every k, a power of two: so ranks that choose others compare where both do.

    Attributes:
        costs: the seconds that the last comparisons have taken.
    """

    def __init__(self) -> None:
        self.costs: deque[float] = deque(maxlen=_COSTS)
        self._next = 1
        self._then, self._before = 0.0, 0  # time and steps of the last comparison

    def is_due(self, count: int) -> bool:
        """Whether to compare now."""
        return count >= self._next

    def compared(self, count: int, steps: int, optimizers: int = 1) -> None:
        """Choose when to compare next."""
        self._next = count + 1 if count < _FIRST else self._choose(count, steps, optimizers)

    def _choose(self, count: int, steps: int, optimizers: int) -> int:
        now, taken = time.perf_counter(), steps - self._before
        seconds = (now - self._then) / taken if self._then and taken else 0.0
        self._then, self._before = now, steps
        every = 1
        if seconds and self.costs:
            while every * seconds * _SHARE < min(self.costs) * optimizers:
                every *= 2
        else:
            every = 1 << count.bit_length()
        return (count // every + 1) * every
