"""Measure a case in interleaved pairs, and the arithmetic of ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .case import Case, Side
from .sample import Failed, Sample, Skipped

if TYPE_CHECKING:
    from .lab import Lab


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of several values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """The spread of some values; None if there are none."""
        return cls(statistics.median(values), min(values), max(values)) if values else None


def ratios(ours: Sequence[Sample], others: Sequence[Sample]) -> list[float]:
    """Paceline's time divided by the other's, for each pair."""
    return [our.seconds / other.seconds for our, other in zip(ours, others, strict=True)]


def counted(ours: Sequence[Sample], others: Sequence[Sample]) -> list[float]:
    """Paceline's requests divided by the other's, for each pair."""
    return [(our.requests or 0) / (other.requests or 1) for our, other in zip(ours, others, strict=True)]


def of_memory(ours: Sequence[Sample], others: Sequence[Sample]) -> list[float]:
    """Paceline's megabytes divided by the other's, for each pair."""
    return [(our.megabytes or 0) / (other.megabytes or 1) for our, other in zip(ours, others, strict=True)]


@dataclass
class Row:
    """A case and what was measured of it."""

    case: Case
    paceline: list[Sample] = field(default_factory=list)
    other: list[Sample] = field(default_factory=list)
    error: str = ""
    skipped: str = ""  # why it was not measured

    @property
    def ratios(self) -> list[float]:
        """One ratio per pair; none for a reference time."""
        if not self.case.paceline or not self.case.other:
            return []
        of = of_memory if self.case.is_memory else counted if self.case.is_count else ratios
        return of(self.paceline, self.other)

    @property
    def delays(self) -> list[float]:
        """How many seconds paceline took longer, for each pair; none for a reference time."""
        if not self.case.paceline or not self.case.other:
            return []
        return [our.seconds - other.seconds for our, other in zip(self.paceline, self.other, strict=True)]

    @property
    def apart(self) -> float | None:
        """The largest difference of the losses of a pair; None if they have none."""
        pairs = zip(self.paceline, self.other, strict=False)
        found = [abs(a.loss - b.loss) for a, b in pairs if a.loss is not None and b.loss is not None]
        return max(found, default=None)

    @property
    def pairs(self) -> int:
        """How often each side was measured."""
        return len(self.paceline if self.case.paceline else self.other)

    @property
    def is_goal_met(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        if self.case.goal is None or self.skipped:
            return None
        ratio, seconds = Spread.of(self.ratios), Spread.of([s.seconds for s in self.paceline])
        memory = Spread.of([s.megabytes for s in self.paceline if s.megabytes is not None])
        spreads = ratio, seconds, memory, Spread.of(self.delays)
        return self.case.goal.is_met(*(spread.median if spread else None for spread in spreads), apart=self.apart)


def measure(case: Case, pairs: int, lab: Lab, progress: Callable[[str], None]) -> Row:
    """Measure both sides of a case in pairs; the first failure ends the row."""
    row = Row(case)
    pairs = 1 if case.once else pairs
    columns = [samples for side, samples in ((case.paceline, row.paceline), (case.other, row.other)) if side]
    taken = case.together(lab, pairs) if case.together else _in_turns(case, pairs, lab)
    try:
        progress(f"{case.name}: warm-up")
        for number, samples in enumerate(taken, start=1):
            for column, sample in zip(columns, samples, strict=True):
                column.append(sample)
            progress(f"{case.name}: {number} of {pairs} pairs")
    except Failed as failure:
        row.error = str(failure)
    except Skipped as why:
        row.skipped = str(why)
    return row


def _in_turns(case: Case, pairs: int, lab: Lab) -> Iterator[Sequence[Sample]]:
    """Warm up both sides once, then measure them in turns: A B A B …."""
    sides = [side for side in (case.paceline, case.other) if side]
    if not case.once:
        for side in sides:
            _measure_once(side, lab)
    for _ in range(pairs):
        yield [_measure_once(side, lab) for side in sides]


def _measure_once(side: Side, lab: Lab) -> Sample:
    assert side.measure is not None
    try:
        return side.measure(lab)
    except Failed as failure:
        raise Failed(f"{side.label}: {failure}") from None
