"""Horovod's API: a training step, many small allreduces, and a thread that has nothing to do."""

from __future__ import annotations

from collections.abc import Iterator

from ..case import Case, Goal, Pair, Side
from ..lab import SCRIPTS, Lab, installed
from ..sample import Sample

SCRIPT = str(SCRIPTS / "horovod_ops.py")


def _pairs(lab: Lab, count: int, ranks: int, what: str) -> Iterator[Pair]:
    """One pair per start of the ranks, in which both sides take turns."""
    for _ in range(count):
        ours, other = lab.answer([installed("paceline"), "run", "-n", str(ranks), SCRIPT, what])
        yield Sample(ours), Sample(other)


def _step(ranks: int) -> Case:
    return Case(
        f"horovod-step-{ranks}",
        f"a step of {ranks} ranks, 21 MB of gradients",
        Side("DistributedOptimizer"),
        Side("DDP by hand"),
        Goal(1.05),
        together=lambda lab, count: _pairs(lab, count, ranks, "step"),
    )


CASES = [
    _step(2),
    _step(4),
    Case(
        "horovod-small",
        "1,000 named allreduces of 10 numbers, 2 ranks",
        Side("allreduce_async_"),
        Side("gloo, one by one"),
        Goal(0.2),
        together=lambda lab, count: _pairs(lab, count, 2, "small"),
    ),
    Case(
        "horovod-one",
        "CPU time of 100 allreduces of one number, 2 ranks",
        Side("allreduce"),
        Side("gloo"),
        Goal(1.5),
        together=lambda lab, count: _pairs(lab, count, 2, "one"),
    ),
    Case(
        "horovod-idle",
        "CPU time of the thread in 5 s without work",
        Side("paceline-horovod"),
        Side("the 5 s"),
        Goal(0.001),
        together=lambda lab, count: _pairs(lab, count, 2, "idle"),
    ),
]
