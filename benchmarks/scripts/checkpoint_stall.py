"""`checkpoint_stall.py MODEL torch.save|async_save COUNT FILE`: how long saving model and optimizer stalls training.

The ranks train with the library. They save in turns with `run.save` and in the other way, and continue to train until
the save is finished on all ranks before they start the next one. Writes pairs to FILE, of each save the seconds of the
slowest rank, since the others would wait for it in the next exchange of gradients, and the megabytes by which the peak
memory of each rank until the save is finished exceeds that of training without one.
"""

import json
import shutil
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
from training import WORK, with_library

import paceline

WARM_UP = 2  # saves of each kind, which allocate memory
# At least, after a save and again after it is finished.
STEPS = {"digits": 10, "chargpt": 2, "100mb": 1, "3gb": 1, "small": 1}
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
        if self._run.is_main:
            path = self._folder / f"{self._run.step}.pt"
            torch.save({name: thing.state_dict() for name, thing in trained.items()}, path)

    def is_finished(self) -> bool:
        if self._run.is_main:
            for old in self._folder.iterdir():
                old.unlink()
        return True


class AsyncSave(Saver):
    """torch.distributed.checkpoint with a stager that keeps its memory for the next save."""

    def __init__(self, run: paceline.Run, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._group = dist.new_group(backend="gloo")  # its thread communicates while training does
        self._stager = DefaultStager(StagingOptions(False, False, False, False))  # the others need a GPU
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
    run.barrier()
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

    found: dict[Saver, list[tuple[float, list[float]]]] = {saver: [] for saver in savers}
    for number in range(WARM_UP + count):
        for saver in savers if number % 2 else reversed(savers):
            trained = train()
            peak_megabytes(run)
            trained = train()
            before = peak_megabytes(run)
            seconds = measure_stall(run, saver, trained)
            deadline = time.monotonic() + TIMEOUT
            train()
            while not run.all_reduce(saver.is_finished(), "min"):
                if time.monotonic() > deadline:
                    raise SystemExit(f"a save was not finished in {TIMEOUT:g} s")
                train()
            more = [after - each for after, each in zip(peak_megabytes(run), before, strict=True)]
            found[saver].append((seconds, more))
    if run.is_main:
        pairs = list(zip(*(found[saver][WARM_UP:] for saver in savers), strict=True))
        Path(file).write_text(json.dumps(pairs))
    run.close()


main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
