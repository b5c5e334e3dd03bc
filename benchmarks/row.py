"""Measure a case in interleaved pairs, and the arithmetic of ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .case import Case, Failed, Sample, Side

if TYPE_CHECKING:
    from .lab import Lab


@dataclass(frozen=True)
class Spread:
    """Where the values of several pairs lie."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """The spread of some values; None if there are none."""
        return cls(statistics.median(values), min(values), max(values)) if values else None


def ratios(ours: Sequence[Sample], others: Sequence[Sample]) -> list[float]:
    """How long we took, as a part of what the other took, one ratio a pair."""
    return [our.seconds / other.seconds for our, other in zip(ours, others, strict=True)]


@dataclass
class Row:
    """A case and what was measured of it."""

    case: Case
    paceline: list[Sample] = field(default_factory=list)
    other: list[Sample] = field(default_factory=list)
    error: str = ""

    @property
    def ratios(self) -> list[float]:
        """One ratio a pair; none for a reference time."""
        return ratios(self.paceline, self.other) if self.case.paceline and self.case.other else []

    @property
    def pairs(self) -> int:
        """How often each side was measured."""
        return len(self.paceline if self.case.paceline else self.other)

    @property
    def is_goal_met(self) -> bool | None:
        """None without a goal."""
        if self.case.goal is None:
            return None
        ratio, seconds = Spread.of(self.ratios), Spread.of([s.seconds for s in self.paceline])
        return self.case.goal.is_met(ratio.median if ratio else None, seconds.median if seconds else None)


def measure(case: Case, pairs: int, lab: Lab, progress: Callable[[str], None]) -> Row:
    """Warm both sides up once, then measure them in turn: A B A B …; the first failure ends the row."""
    row = Row(case)
    sides = [(side, samples) for side, samples in ((case.paceline, row.paceline), (case.other, row.other)) if side]
    try:
        for side, _ in sides:
            progress(f"{case.name}: warm-up")
            _measure_once(side, lab)
        for number in range(1, pairs + 1):
            progress(f"{case.name}: pair {number} of {pairs}")
            taken = [_measure_once(side, lab) for side, _ in sides]
            for (_, samples), sample in zip(sides, taken, strict=True):
                samples.append(sample)
    except Failed as failure:
        row.error = str(failure)
    return row


def _measure_once(side: Side, lab: Lab) -> Sample:
    try:
        return side.measure(lab)
    except Failed as failure:
        raise Failed(f"{side.label}: {failure}") from None
