"""Models of which each rank keeps a part: the time of a step, and memory, with the library and with FSDP2 by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

from ..case import Case, Goal, Pair, Side
from ..lab import SCRIPTS, Lab, free_port, installed
from ..sample import Failed, Sample

PLAN, LOSS = str(SCRIPTS / "plan_memory.py"), str(SCRIPTS / "shard_loss.py")
STEP, MEMORY = str(SCRIPTS / "shard_step.py"), str(SCRIPTS / "shard_memory.py")
PIPELINE = str(SCRIPTS / "pipeline_step.py")
PACELINE = installed("paceline")
RANKS = 4  # in rows of memory


def _steps(lab: Lab, count: int, what: str, script: str = STEP) -> Iterator[Pair]:
    """One pair per start of the ranks, in which both sides take turns."""
    for _ in range(count):
        ours, other = lab.answer([PACELINE, "run", "-n", "2", script, what])
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


def _in_stages(lab: Lab) -> Sample:
    return _memory(lab, [PACELINE, "run", "-n", str(RANKS)], "pipeline")


def _by_hand(lab: Lab) -> Sample:
    ranks = ["--nproc-per-node", str(RANKS), "--master-port", str(free_port())]
    return _memory(lab, [installed("torchrun"), *ranks], "fsdp")


def _whole(lab: Lab) -> Sample:
    return _memory(lab, [sys.executable], "whole")


def _memory_case(
    name: str,
    label: str,
    other: Callable[[Lab], Sample],
    goal: float,
    own: tuple[str, Callable[[Lab], Sample]] = ("shard=True", _sharded),
) -> Case:
    """Memory needs no warm-up."""
    return Case(
        name,
        f"peak memory of a rank of {RANKS}, a model of 389 MB with AdamW",
        Side(f"Strategy({own[0]})"),
        Side(label),
        Goal(goal),
        together=lambda lab, count: ((own[1](lab), other(lab)) for _ in range(count)),
        is_memory=True,
    )


def _plan(lab: Lab, architecture: str) -> Iterator[Pair]:
    """The larger and the smaller of the memory that is predicted and measured, with 1, 2 and 4 ranks."""
    for ranks in (1, 2, 4):
        command = [PACELINE, "plan", "-n", str(ranks), "--all", "-o", "json", PLAN, architecture, "-"]
        way = "shard=True" if ranks > 1 else "a copy on each rank"
        said = subprocess.run(command, env=lab.env, check=True, capture_output=True).stdout
        predicted = next(each["total"] for each in json.loads(said) if each["way"] == way) / 1e6
        measured = lab.answer([PACELINE, "run", "-n", str(ranks), PLAN, architecture])
        yield Sample(0.0, megabytes=max(predicted, measured)), Sample(0.0, megabytes=min(predicted, measured))


def _plan_case(architecture: str) -> Case:
    return Case(
        f"plan-{architecture}",
        "peak memory of 1, 2 and 4 ranks, predicted and measured",
        Side("the larger of the two"),
        Side("the smaller"),
        Goal(1.1),
        together=lambda lab, _: _plan(lab, architecture),
        is_memory=True,
    )


def _pipeline_case(schedule: str) -> Case:
    return Case(
        f"pipeline-step-{schedule}-2",
        "a step of 2 stages, blocks of 7.6 M parameters, 8 microbatches, AdamW",
        Side(f'Strategy(pipeline=2, schedule="{schedule}")'),
        Side("torch.distributed.pipelining by hand"),
        Goal(1.1),
        together=lambda lab, count: _steps(lab, count, schedule, PIPELINE),
    )


def _loss(lab: Lab, architecture: str) -> Iterator[Pair]:
    """With 2 and 4 ranks, the losses of the step in which both sides differ most."""
    for ranks in (2, 4):
        words = [LOSS, architecture, str(ranks)]
        (seconds, ours), (_, again) = (lab.answer([PACELINE, "run", "-n", str(ranks), *words]) for _ in range(2))
        if ours != again:
            raise Failed(f"two runs with {ranks} ranks have other losses")
        other_seconds, others = lab.answer([sys.executable, *words], OMP_NUM_THREADS="1")  # as ranks on 2 cores have
        mine, other = max(zip(ours, others, strict=True), key=lambda pair: abs(pair[0] - pair[1]))
        yield Sample(seconds, loss=mine), Sample(other_seconds, loss=other)


def _loss_case(architecture: str) -> Case:
    return Case(
        f"shard-loss-{architecture}",
        "the losses of 100 steps of AdamW, with 2 and 4 ranks",
        Side("Strategy(shard=True)"),
        Side("one process with torch"),
        Goal(apart=1e-6),
        together=lambda lab, _: _loss(lab, architecture),
    )


ARCHITECTURES = ("mlp", "convnet", "transformer", "lstm", "decoder")
CASES = [
    *map(_plan_case, ARCHITECTURES),
    *map(_loss_case, ARCHITECTURES),
    *map(_pipeline_case, ("1f1b", "gpipe")),
    _memory_case(f"pipeline-memory-{RANKS}", "one rank, whole model", _whole, 0.35, (f"pipeline={RANKS}", _in_stages)),
    _step_case("shard-step-2", "FSDP2 by hand", "fsdp", 0.8),
    _step_case("shard-step-ddp-2", "DDP by hand", "ddp", 1.3),
    _memory_case(f"shard-memory-{RANKS}", "one rank, whole model", _whole, 0.3),
    _memory_case(f"shard-memory-fsdp-{RANKS}", "FSDP2 by hand", _by_hand, 1.05),
]
