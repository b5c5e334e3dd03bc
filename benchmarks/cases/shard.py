"""Models of which each rank keeps a part: the time of a step, and memory, with the library and with FSDP2 by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from ..case import Case, Goal, Pair, Side
from ..lab import SCRIPTS, Lab, free_port, installed
from ..sample import Sample

STEP, MEMORY = str(SCRIPTS / "shard_step.py"), str(SCRIPTS / "shard_memory.py")
PACELINE = installed("paceline")
RANKS = 4  # in rows of memory


def _steps(lab: Lab, count: int, what: str) -> Iterator[Pair]:
    """One pair per start of the ranks, in which both sides take turns."""
    for _ in range(count):
        ours, other = lab.answer([PACELINE, "run", "-n", "2", STEP, what])
        yield Sample(ours), Sample(other)


def _step_case(name: str, label: str, what: str, goal: float) -> Case:
    return Case(
        name,
        "a step of 2 ranks, blocks of 7.6 M parameters, AdamW",
        Side("Strategy(shard=True)"),
        Side(label),
        Goal(goal),
        together=lambda lab, count: _steps(lab, count, what),
    )


def _memory(lab: Lab, command: list[str], what: str) -> Sample:
    seconds, steady, _ = lab.answer([*command, MEMORY, what])
    return Sample(seconds, megabytes=steady)


def _sharded(lab: Lab) -> Sample:
    return _memory(lab, [PACELINE, "run", "-n", str(RANKS)], "paceline")


def _by_hand(lab: Lab) -> Sample:
    ranks = ["--nproc-per-node", str(RANKS), "--master-port", str(free_port())]
    return _memory(lab, [installed("torchrun"), *ranks], "fsdp")


def _whole(lab: Lab) -> Sample:
    return _memory(lab, [sys.executable], "whole")


def _memory_case(name: str, label: str, other: Callable[[Lab], Sample], goal: float) -> Case:
    """Memory needs no warm-up."""
    return Case(
        name,
        f"peak memory of a rank of {RANKS}, a model of 389 MB with AdamW",
        Side("Strategy(shard=True)"),
        Side(label),
        Goal(goal),
        together=lambda lab, count: ((_sharded(lab), other(lab)) for _ in range(count)),
        is_memory=True,
    )


CASES = [
    _step_case("shard-step-2", "FSDP2 by hand", "fsdp", 0.8),
    _step_case("shard-step-ddp-2", "DDP by hand", "ddp", 1.3),
    _memory_case(f"shard-memory-{RANKS}", "one rank, whole model", _whole, 0.3),
    _memory_case(f"shard-memory-fsdp-{RANKS}", "FSDP2 by hand", _by_hand, 1.05),
]
