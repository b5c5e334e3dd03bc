"""A benchmark: some work, done by paceline and by another tool, and a goal for the ratio of their times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .sample import Sample

if TYPE_CHECKING:
    from .lab import Lab


Pair = tuple[Sample, Sample]  # of paceline, of the other tool


@dataclass(frozen=True)
class Side:
    """One of the two tools. `measure` does the work once, unless the case measures both together."""

    label: str
    measure: Callable[[Lab], Sample] | None = None


@dataclass(frozen=True)
class Goal:
    """Upper limits of the median ratio, of paceline's own median time or memory, or of its median delay.

    Attributes:
        ratio: of the pairs.
        seconds: of paceline.
        megabytes: of paceline.
        beyond: seconds by which paceline took longer than the other of its pair.
        apart: the largest difference of the losses of a pair.
    """

    ratio: float | None = None
    seconds: float | None = None
    megabytes: float | None = None
    beyond: float | None = None
    apart: float | None = None

    def __str__(self) -> str:
        parts = [f"≤ {self.ratio:.3f}".removesuffix("0")] if self.ratio is not None else []
        if self.seconds is not None:
            parts.append(f"≤ {self.seconds * 1000:g} ms")
        if self.megabytes is not None:
            parts.append(f"≤ {self.megabytes:g} MB")
        if self.beyond is not None:
            parts.append(f"≤ {self.beyond * 1000:g} ms more")
        if self.apart is not None:
            parts.append(f"≤ {self.apart:g} apart")
        return ", ".join(parts)

    def is_met(
        self,
        ratio: float | None,
        seconds: float | None,
        megabytes: float | None = None,
        beyond: float | None = None,
        apart: float | None = None,
    ) -> bool:
        """Whether all limits are met; a limit of something that was not measured is not met."""
        pairs = (
            (ratio, self.ratio), (seconds, self.seconds), (megabytes, self.megabytes), (beyond, self.beyond),
            (apart, self.apart),
        )  # fmt: skip
        return all(limit is None or (measured is not None and measured <= limit) for measured, limit in pairs)


@dataclass(frozen=True)
class Case:
    """A row of the table. Without `paceline` it is a reference time, which has no ratio.

    Attributes:
        together: measures a number of pairs, for work in which both sides take turns within one program; includes the
            warm-up.
        is_count: whether the ratio is that of the requests, not of the times.
        is_memory: whether it is that of the megabytes.
        once: whether to measure one pair without a warm-up, because the other side takes very long.
    """

    name: str
    work: str
    paceline: Side | None
    other: Side | None
    goal: Goal | None = None
    together: Callable[[Lab, int], Iterable[Pair]] | None = None
    once: bool = False
    is_count: bool = False
    is_memory: bool = False
