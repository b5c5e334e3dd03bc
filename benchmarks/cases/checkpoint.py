"""How long saving a checkpoint stalls the training loop, and loading one that other ranks have saved."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

from ..case import Case, Goal, Pair, Side
from ..lab import SCRIPTS, Lab, installed
from ..sample import Sample

SCRIPT = str(SCRIPTS / "checkpoint_stall.py")
LOAD = str(SCRIPTS / "checkpoint_load.py")
RANKS = 2
SAVED_BY = 4
_OTHERS = {"torch.save": "torch.save", "async_save": "dcp.async_save"}
_LONG = 1800.0  # seconds: a step between two saves of 3 GB, or of 133,336 tensors, takes seconds


_found: dict[tuple[str, str, int], Any] = {}  # what the script has said; two rows are of the same saves


def _answer(lab: Lab, count: int, model: str, other: str) -> Any:
    key = model, other, count
    if key not in _found:
        command = [installed("paceline"), "run", "-n", str(RANKS), SCRIPT, model, other, str(count)]
        try:
            _found[key] = lab.answer(command, seconds=_LONG)
        finally:
            shutil.rmtree(lab.folder / "checkpoints", ignore_errors=True)
    return _found[key]


def _pairs(lab: Lab, count: int, model: str, other: str) -> Iterator[Pair]:
    """All pairs of one start: each save is one half of a pair."""
    for pair in _answer(lab, count, model, other):
        ours, others = (Sample(seconds, megabytes=more[0]) for seconds, more, _ in pair)
        yield ours, others


def _lost(lab: Lab, count: int, model: str, other: str) -> Iterator[Pair]:
    """The same with the slower steps. A negative number is noise: a save costs something."""
    for pair in _answer(lab, count, model, other):
        ours, others = (Sample(max(lost, seconds)) for seconds, _, lost in pair)
        yield ours, others


def _case(model: str, state: str, other: str, goal: float) -> Case:
    return Case(
        f"stall-{model}-{other}",
        f"a save stalls {RANKS} ranks, {state}",
        Side("run.save"),
        Side(_OTHERS[other]),
        Goal(goal),
        together=lambda lab, count: _pairs(lab, count, model, other),
    )


def _lost_case(model: str, state: str, other: str, goal: float) -> Case:
    return Case(
        f"lost-{model}-{other}",
        f"the same with the slower steps until it is finished, {state}",
        Side("run.save"),
        Side(_OTHERS[other]),
        Goal(goal),
        together=lambda lab, count: _lost(lab, count, model, other),
    )


STATES = {
    "digits": "1.8 MB",
    "chargpt": "7.4 MB",
    "100mb": "300 MB",
    "3gb": "3 GB",
    "small": "133,336 tensors",
}  # model and optimizer
SHARDED = {"shard-2mb": "2.1 MB", "shard-200mb": "200 MB", "shard-1gb": "970 MB"}


def _loads(lab: Lab, count: int, model: str) -> Iterator[Pair]:
    """All pairs of one start of the ranks that load."""
    run = [installed("paceline"), "run", "-n"]
    try:
        lab.answer([*run, str(SAVED_BY), LOAD, "save", model, "0"], seconds=_LONG)
        for ours, other in lab.answer([*run, str(RANKS), LOAD, "load", model, str(count)], seconds=_LONG):
            yield Sample(ours), Sample(other)
    finally:
        shutil.rmtree(lab.folder / "checkpoints", ignore_errors=True)


def _load_case(model: str, state: str) -> Case:
    return Case(
        f"load-{model}",
        f"{RANKS} ranks load what {SAVED_BY} have saved, a sharded model, {state} of state",
        Side("run.resume"),
        Side("dcp.load"),
        Goal(0.7),
        together=lambda lab, count: _loads(lab, count, model),
    )


CASES = [
    *(
        _case(model, f"{size} of state", other, goal)
        for model, size in STATES.items()
        for other, goal in (("torch.save", 0.1), ("async_save", 1.0))
    ),
    *(
        kind(model, f"a sharded model, {size} of state", other, goal)
        for model, size in SHARDED.items()
        for other, goal in (("torch.save", 0.5 if model == "shard-2mb" else 0.1), ("async_save", 0.5))
        for kind in (_case, _lost_case)
    ),
    *(_load_case(model, size) for model, size in SHARDED.items() if model != "shard-2mb"),
]
