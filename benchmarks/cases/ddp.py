"""One step of a training loop: with the library, and with DDP, DistributedSampler and DataLoader by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ..case import Case, Goal, Pair, Side
from ..lab import SCRIPTS, Lab, installed
from ..sample import Sample

SCRIPT = str(SCRIPTS / "ddp_step.py")
REPLICAS = str(SCRIPTS / "replicas_step.py")
ONE_RANK, WATCHED = str(SCRIPTS / "one_rank.py"), str(SCRIPTS / "watched.py")
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


def _one_rank(lab: Lab, count: int, kind: str) -> Iterator[Pair]:
    for ours, other in lab.answer([sys.executable, ONE_RANK, str(count), kind]):
        yield Sample(*ours), Sample(*other)


def _one_rank_case(name: str, kind: str, data: str) -> Case:
    return Case(
        name,
        f"a step of one rank, {data}",
        Side("run.backward, run.dataloader"),
        Side("torch alone"),
        Goal(1.02),
        together=lambda lab, count: _one_rank(lab, count, kind),
    )


def _watched(lab: Lab, count: int) -> Iterator[Pair]:
    for _ in range(count):
        ours, other = lab.answer([installed("paceline"), "run", WATCHED])
        yield Sample(*ours), Sample(*other)


def _replicas(lab: Lab, count: int, size: str) -> Iterator[Pair]:
    for _ in range(count):
        ours, other = lab.answer([installed("paceline"), "run", "-n", str(RANKS), REPLICAS, size])
        yield Sample(*ours), Sample(*other)


def _replicas_case(size: str) -> Case:
    return Case(
        f"replicas-{size}mb",
        f"a step of {RANKS} ranks, {size} MB of parameters",
        Side("replicas are compared"),
        Side("not compared"),
        Goal(1.001),
        together=lambda lab, count: _replicas(lab, count, size),
    )


DIGITS, CHARGPT = "convnet of 0.15 M parameters", "transformer of 0.62 M parameters"
CASES = [
    _case("digits", DIGITS),
    _case("chargpt", CHARGPT),
    _case("100mb", "linear layers of 25 M parameters"),
    _log_case("digits", DIGITS),
    _log_case("chargpt", CHARGPT),
    *(_replicas_case(size) for size in ("0.1", "10", "100")),
    _one_rank_case("one-rank", "tensors", "a TensorDataset"),
    Case(
        "watched",
        "a step of one rank, torch alone",
        Side("watched"),
        Side("not watched"),
        Goal(1.004),
        together=_watched,
    ),
    _one_rank_case("one-rank-own", "own", "a data set that reads sample by sample"),
]
