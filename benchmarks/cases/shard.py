"""Models of which each rank keeps a part: the time of a step, and memory, with the library and with FSDP2 by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator

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


MODEL = "model of 410 MB with AdamW"
CASES = [
    _step_case("shard-step-2", "FSDP2 by hand", "fsdp", 0.8),
    _step_case("shard-step-ddp-2", "DDP by hand", "ddp", 1.3),
    Case(
        f"shard-memory-{RANKS}",
        f"memory of a rank of {RANKS}, {MODEL}",
        Side("Strategy(shard=True)", _sharded),
        Side("one rank, whole model", _whole),
        Goal(0.3),
        is_memory=True,
    ),
    Case(
        f"shard-memory-fsdp-{RANKS}",
        f"memory of a rank of {RANKS}, {MODEL}",
        Side("Strategy(shard=True)", _sharded),
        Side("FSDP2 by hand", _by_hand),
        Goal(1.05),
        is_memory=True,
    ),
]
