"""`checkpoint_stall.py MODEL torch.save|async_save COUNT FILE`: how long saving stalls training.

The ranks train with the library. They save in turns with `run.save` and in the other way, and continue to train until
the save is finished on all ranks before they start the next one. Writes pairs to FILE, of each save the seconds of the
slowest rank, since the others would wait for it in the next exchange of gradients, and the megabytes by which the peak
memory of each rank until the save is finished exceeds that of training without one; and, third, the seconds that the
training has lost: those of the call, and those by which the steps take longer until the save is finished.

Of a sharded model, each rank saves its part.
"""

import json
import shutil
import statistics
import sys
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from training import WORK, with_library
from turns import finish

import paceline

WARM_UP = 2  # saves of each kind, which allocate memory
# At least, after a save and again after it is finished.
STEPS = {
    "digits": 10, "chargpt": 2, "100mb": 1, "3gb": 1, "small": 1, "shard-2mb": 20, "shard-200mb": 2, "shard-1gb": 1,
}  # fmt: skip
TIMEOUT = 300.0  # seconds in which a save must be finished


class Saver(ABC):
    """One way to save."""

    @abstractmethod
    def save(self, trained: dict[str, Any]) -> None:
        """Save, as the training loop calls it."""

    @abstractmethod
    def is_finished(self) -> bool:
        """Whether the save is on the disk."""


class Library(Saver):
    def __init__(self, run: paceline.Run, folder: Path) -> None:
        self._run = run
        self._folder = folder

    def save(self, trained: dict[str, Any]) -> None:
        self._path = self._folder / f"step-{self._run.step:06d}"
        self._run.save()

    def is_finished(self) -> bool:
        return self._path.exists()


class TorchSave(Saver):
    def __init__(self, run: paceline.Run, folder: Path) -> None:
        self._run = run
        self._folder = folder

    def save(self, trained: dict[str, Any]) -> None:
        states = {name: thing.state_dict() for name, thing in trained.items()}
        is_sharded = any(isinstance(each, DTensor) for each in states["model"].values())
        if self._run.is_main or is_sharded:
            part = tree_map_only(DTensor, DTensor.to_local, states) if is_sharded else states
            torch.save(part, self._folder / f"{self._run.step}-{self._run.rank}.pt")

    def is_finished(self) -> bool:
        for old in self._folder.glob(f"*-{self._run.rank}.pt"):
            old.unlink()
        return True


class AsyncSave(Saver):
    """torch.distributed.checkpoint with a stager that keeps its memory for the next save."""

    def __init__(self, run: paceline.Run, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._group = (
            dist.new_group(backend="gloo") if dist.is_initialized() else None
        )  # its thread communicates while training does
        on_gpu = run.device.type == "cuda"  # pinned memory and copies that are not waited for one by one need one
        self._stager = DefaultStager(StagingOptions(on_gpu, False, False, on_gpu))
        self._writing: Future[Any] = Future()

    def save(self, trained: dict[str, Any]) -> None:
        state = {name: thing.state_dict() for name, thing in trained.items()}
        path = self._folder / str(self._run.step)
        answer = dcp.async_save(state, checkpoint_id=path, process_group=self._group, async_stager=self._stager)
        assert isinstance(answer, Future)
        self._writing = answer

    def is_finished(self) -> bool:
        if not self._writing.done():
            return False
        self._writing.result()
        if self._run.is_main:
            for old in self._folder.iterdir():
                shutil.rmtree(old)
        return True


def measure_stall(run: paceline.Run, saver: Saver, trained: dict[str, Any]) -> float:
    """Seconds that the slowest rank spends in the call."""
    finish(run)
    began = time.perf_counter()
    saver.save(trained)
    return run.all_reduce(time.perf_counter() - began, "max")


def peak_megabytes(run: paceline.Run) -> list[float]:
    """The peak memory of each rank since the last call."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
    kilobytes = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return [float(each) * 1024 / 1e6 for each in run.all_gather(torch.tensor(float(kilobytes)))]


def main(name: str, other: str, count: int, file: str) -> None:
    folders = [Path(file).parent / "checkpoints" / who for who in ("paceline", other)]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    run = paceline.init(seed=0, checkpoint_dir=folders[0], keep=1)
    training = with_library(run, WORK[name]())
    savers = Library(run, folders[0]), {"torch.save": TorchSave, "async_save": AsyncSave}[other](run, folders[1])

    def train() -> dict[str, Any]:
        for _ in range(STEPS[name]):
            trained = next(training)
        return trained

    plain: list[float] = []  # seconds of steps without a save
    found: dict[Saver, list[tuple[float, list[float], float, int]]] = {saver: [] for saver in savers}
    for number in range(WARM_UP + count):
        for saver in savers if number % 2 else reversed(savers):
            trained = train()
            peak_megabytes(run)
            began = time.perf_counter()
            trained = train()
            plain.append((time.perf_counter() - began) / STEPS[name])
            before = peak_megabytes(run)
            run.barrier()
            began = time.perf_counter()
            seconds = measure_stall(run, saver, trained)
            deadline, steps = time.monotonic() + TIMEOUT, STEPS[name]
            train()
            while not run.all_reduce(saver.is_finished(), "min"):
                if time.monotonic() > deadline:
                    raise SystemExit(f"a save was not finished in {TIMEOUT:g} s")
                train()
                steps += STEPS[name]
            took = run.all_reduce(time.perf_counter() - began, "max")
            more = [after - each for after, each in zip(peak_megabytes(run), before, strict=True)]
            found[saver].append((seconds, more, took, steps))
    step = statistics.median(plain[2 * WARM_UP :])
    rows = [
        [(seconds, more, took - steps * step) for seconds, more, took, steps in found[saver][WARM_UP:]]
        for saver in savers
    ]
    if run.is_main:
        Path(file).write_text(json.dumps(list(zip(*rows, strict=True))))
    run.close()


main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
