"""How long saving a checkpoint stalls the training loop."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from ..case import Case, Goal, Pair, Side
from ..lab import SCRIPTS, Lab, installed
from ..sample import Sample

SCRIPT = str(SCRIPTS / "checkpoint_stall.py")
RANKS = 2
_LONG = 1800.0  # seconds: a step between two saves of 3 GB, or of 133,336 tensors, takes seconds


def _pairs(lab: Lab, count: int, model: str, other: str) -> Iterator[Pair]:
    """All pairs of one start: each save is one half of a pair."""
    command = [installed("paceline"), "run", "-n", str(RANKS), SCRIPT, model, other, str(count)]
    try:
        for pair in lab.answer(command, seconds=_LONG):
            ours, others = (Sample(seconds, megabytes=more[0]) for seconds, more in pair)
            yield ours, others
    finally:
        shutil.rmtree(lab.folder / "checkpoints", ignore_errors=True)


def _case(model: str, state: str, other: str, goal: float) -> Case:
    return Case(
        f"stall-{model}-{other}",
        f"a save stalls {RANKS} ranks, {state}",
        Side("run.save"),
        Side({"torch.save": "torch.save", "async_save": "dcp.async_save"}[other]),
        Goal(goal),
        together=lambda lab, count: _pairs(lab, count, model, other),
    )


STATES = {
    "digits": "1.8 MB",
    "chargpt": "7.4 MB",
    "100mb": "300 MB",
    "3gb": "3 GB",
    "small": "133,336 tensors",
}  # model and optimizer
CASES = [
    _case(model, f"{size} of state", other, goal)
    for model, size in STATES.items()
    for other, goal in (("torch.save", 0.1), ("async_save", 1.0))
]
