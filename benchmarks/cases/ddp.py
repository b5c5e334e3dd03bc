"""One step of a training loop: with the library, and with DDP, DistributedSampler and DataLoader by hand."""

from __future__ import annotations

from collections.abc import Iterator

from ..case import Case, Goal, Pair, Side
from ..lab import SCRIPTS, Lab, installed
from ..sample import Sample

SCRIPT = str(SCRIPTS / "ddp_step.py")
RANKS = 2


def _pairs(lab: Lab, count: int, model: str, kind: str) -> Iterator[Pair]:
    """One pair per start of the ranks, since the memory layout of a process may favour one side."""
    for _ in range(count):
        ours, other = lab.answer([installed("paceline"), "run", "-n", str(RANKS), SCRIPT, model, kind])
        yield Sample(ours), Sample(other)


def _case(model: str, parameters: str) -> Case:
    return Case(
        f"ddp-{model}",
        f"a step of {RANKS} ranks, {parameters}",
        Side("run.backward, run.dataloader"),
        Side("DDP by hand"),
        Goal(1.01),
        together=lambda lab, count: _pairs(lab, count, model, "plain"),
    )


def _log_case(model: str, parameters: str) -> Case:
    return Case(
        f"ddp-{model}-log",
        f"the same with the loss logged, {parameters}",
        Side("run.log"),
        Side("loss.item(), all_reduce"),
        together=lambda lab, count: _pairs(lab, count, model, "log"),
    )


DIGITS, CHARGPT = "convnet of 0.15 M parameters", "transformer of 0.62 M parameters"
CASES = [
    _case("digits", DIGITS),
    _case("chargpt", CHARGPT),
    _case("100mb", "linear layers of 25 M parameters"),
    _log_case("digits", DIGITS),
    _log_case("chargpt", CHARGPT),
]
