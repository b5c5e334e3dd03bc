"""The first batch of an epoch of many samples, and after a resume in its middle; and a whole epoch of a stream."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ..case import Case, Goal, Pair, Side
from ..lab import SCRIPTS, Lab
from ..sample import Sample

SCRIPT = str(SCRIPTS / "first_batch.py")
STREAM = str(SCRIPTS / "stream.py")


def _side(label: str, who: str, size: int, position: int = 0) -> Side:
    def measure(lab: Lab) -> Sample:
        return Sample(**lab.answer([sys.executable, SCRIPT, who, str(size), str(position)]))

    return Side(label, measure)


def _epoch(exponent: int, goal: Goal, *, once: bool = False) -> Case:
    return Case(
        f"epoch-1e{exponent}",
        f"first batch of an epoch of 10^{exponent} samples",
        _side("run.dataloader", "paceline", 10**exponent),
        _side("DistributedSampler", "torch", 10**exponent),
        goal,
        once=once,
    )


def _stream(lab: Lab, count: int) -> Iterator[Pair]:
    for ours, other in lab.answer([sys.executable, STREAM, str(count)]):
        yield Sample(*ours), Sample(*other)


GOAL = Goal(seconds=0.010, megabytes=10)
CASES = [
    _epoch(7, GOAL),
    _epoch(8, GOAL, once=True),
    Case(
        "resume",
        "first batch after a resume at sample 10^7 of 2 * 10^7",
        _side("run.dataloader", "paceline", 2 * 10**7, 10**7),
        _side("skipping batches", "torch", 2 * 10**7, 10**7),
        Goal(seconds=0.050),
    ),
    Case(
        "stream",
        "an epoch of 8192 elements of a stream, 4 workers",
        Side("run.dataloader"),
        Side("torch's DataLoader"),
        Goal(1.05),
        together=_stream,
    ),
]
