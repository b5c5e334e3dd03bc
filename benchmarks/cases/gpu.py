"""What needs GPUs: a start, a step over nccl, a sharded step, and the stall of a checkpoint from a GPU's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline.node.machine.devices import accelerators

from ..case import Case, Goal, Pair, Side
from ..lab import SCRIPTS, Lab, free_port, installed
from ..sample import Sample, Skipped

PACELINE, ALLREDUCE = installed("paceline"), str(SCRIPTS / "allreduce_cuda.py")
STEP, SHARD, STALL = (str(SCRIPTS / f"{name}.py") for name in ("ddp_step", "shard_step", "checkpoint_stall"))
_LONG = 600.0  # seconds of a script that takes several pairs


def _visible(count: int) -> dict[str, str]:
    """The variables with which so many GPUs are seen."""
    there = accelerators()
    if len(there) < count:
        raise Skipped(f"needs {count} {'GPU' if count == 1 else 'GPUs'}, and this machine has {len(there) or 'none'}")
    return {"CUDA_VISIBLE_DEVICES": ",".join(there[:count])}


def _timed(lab: Lab, command: list[str]) -> Sample:
    with lab.started([*command, ALLREDUCE], **_visible(1)) as job:
        return Sample(job.finish())


def _torchrun(lab: Lab) -> Sample:
    return _timed(lab, [installed("torchrun"), "--nproc-per-node", "1", "--master-port", str(free_port())])


def _cold(lab: Lab) -> Sample:
    return _timed(lab, [PACELINE, "run", "-n", "1"])


def _warm(lab: Lab) -> Sample:
    with lab.started([PACELINE, "warm"], **_visible(1)) as warm:
        warm.finish()
        return _timed(lab, [PACELINE, "run", "-n", "1"])


def _start_case(name: str, work: str, ours: Callable[[Lab], Sample]) -> Case:
    return Case(name, work, Side("paceline run", ours), Side("torchrun", _torchrun), Goal(1.0))


def _steps(lab: Lab, count: int, script: str, *what: str) -> Iterator[Pair]:
    """One pair per start of two ranks, in which both sides take turns."""
    for _ in range(count):
        ours, other = lab.answer([PACELINE, "run", "-n", "2", script, *what], _LONG, **_visible(2))
        yield Sample(ours), Sample(other)


def _stalls(lab: Lab, count: int, model: str, other: str) -> Iterator[Pair]:
    command = [PACELINE, "run", "-n", "1", STALL, model, other, str(count)]
    for (ours, *_), (others, *_) in lab.answer(command, _LONG, **_visible(1)):
        yield Sample(ours), Sample(others)


def _stall_case(model: str, state: str, other: str, label: str, goal: float) -> Case:
    return Case(
        f"gpu-stall-{model}-{other}",
        f"a save stalls a rank, {state} on a GPU",
        Side("run.save"),
        Side(label),
        Goal(goal),
        together=lambda lab, count: _stalls(lab, count, model, other),
    )


CASES = [
    _start_case("gpu-start", "start a rank on a GPU, one all-reduce over nccl, exit", _cold),
    _start_case("gpu-warm", "the same from a process kept warm", _warm),
    Case(
        "gpu-ddp",
        "a step of 2 ranks over nccl, linear layers of 25 M parameters",
        Side("run.backward, run.dataloader"),
        Side("DDP by hand"),
        Goal(1.01),
        together=lambda lab, count: _steps(lab, count, STEP, "100mb", "plain"),
    ),
    Case(
        "gpu-shard",
        "a step of 2 ranks over nccl, blocks of 7.6 M parameters, AdamW",
        Side("Strategy(shard=True)"),
        Side("fully_shard"),
        Goal(1.01),
        together=lambda lab, count: _steps(lab, count, SHARD, "fsdp"),
    ),
    _stall_case("100mb", "300 MB", "torch.save", "torch.save", 0.1),
    _stall_case("100mb", "300 MB", "async_save", "dcp.async_save", 1.0),
    _stall_case("3gb", "3 GB", "torch.save", "torch.save", 0.1),
]
