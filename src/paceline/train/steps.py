"""What happens between two batches: steps are counted, checkpoints taken, metrics told."""

from __future__ import annotations

import os
import random
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .checkpoint import CheckpointStore, SingleExchange, SocketExchange
from .metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .loader import Loader
    from .run import Run

_AGREE_EVERY = 10  # steps between two looks at rank 0's clock, which decides for all
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Feed:
    """A training loader whose batches mark the steps of a `Run`: asking for the next one ends the step before."""

    def __init__(self, loader: Loader, steps: Steps) -> None:
        self.loader = loader
        self._steps = steps

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._steps.epoch_begins(self.loader)
        try:
            for batch in self.loader:
                self._steps.begin(self.loader)
                yield batch
                self._steps.end()
            self._steps.epoch_ends(self.loader)
        finally:
            self._steps.left(self.loader)


class Interval:
    """How often to take a checkpoint: steps (`500`, `"500 steps"`) or time (`"90s"`, `"10m"`, `"1h"`).

    Raises:
        ValueError: it is none of these.
    """

    def __init__(self, text: int | str) -> None:
        self.steps, self.seconds = 0, 0.0
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(steps?|[smh])?\s*", str(text))
        if match is None or float(match[1]) <= 0:
            raise ValueError(f"checkpoint_every={text!r} is neither steps (500) nor time ('90s', '10m', '1h')")
        if match[2] in _UNITS:
            self.seconds = float(match[1]) * _UNITS[match[2]]
        elif float(match[1]) == int(float(match[1])):
            self.steps = int(float(match[1]))
        else:
            raise ValueError(f"checkpoint_every={text!r}: a checkpoint is taken after whole steps")


class Steps:
    """The steps of a run: how many were done, where in the epochs they stand, and what is due after each.

    Attributes:
        epoch: the epoch that goes on, counted by `Run.epochs`.
        epochs: how many there will be; None where `Run.epochs` is not used.
        done: batches trained on, over all attempts.
    """

    def __init__(self, run: Run, folder: Path | None, every: Interval | None, keep: int, metrics: Metrics) -> None:
        self.epoch = 0
        self.epochs: int | None = None
        self.done = 0
        self.weight = 1.0  # of the loss of the step that goes on
        self.loaders: list[Loader] = []
        self._run = run
        self._every = every
        self._due = time.monotonic() + every.seconds if every else 0.0
        self._exchange: SocketExchange | SingleExchange | None = None
        self._store: CheckpointStore | None = None
        if folder is not None:
            self._exchange = SocketExchange() if run.world_size > 1 else SingleExchange()
            self._store = CheckpointStore(
                folder, rank=run.rank, world_size=run.world_size, exchange=self._exchange, keep=keep
            )
        self.metrics = metrics
        self._followed: Loader | None = None  # of loaders that are iterated together, the first

    @property
    def saves(self) -> bool:
        """Whether checkpoints are taken without being asked for."""
        return self._every is not None and self._store is not None

    def epoch_begins(self, loader: Loader) -> None:
        """An iteration of `loader` begins."""
        if self._followed is None:
            self._followed = loader
            self.metrics.epoch_begins(self.epoch, self.epochs, _length(loader), loader.done)

    def epoch_ends(self, loader: Loader) -> None:
        """`loader` has come to the end of its epoch."""
        if self._followed is loader:
            self.metrics.epoch_ends()

    def left(self, loader: Loader) -> None:
        """The iteration of `loader` is over, at its end or before."""
        if self._followed is loader:
            self._followed = None
            self.metrics.loop_left()
            self.weight = 1.0

    def begin(self, loader: Loader) -> None:
        """A batch of `loader` was handed out."""
        self.weight = loader.weight
        self.metrics.data_came(loader.samples, loader.total)

    def end(self) -> None:
        """The step is done: the optimizer has stepped, and the next batch is asked for."""
        self.done += 1
        self.weight = 1.0
        if self._is_due():
            self.save()
        self.metrics.step_done(self.epoch, self.done)

    def _is_due(self) -> bool:
        if self._every is None or not self.saves:
            return False
        if self._every.steps:
            return self.done % self._every.steps == 0
        if self.done % _AGREE_EVERY:
            return False
        due = self._run.broadcast_object(time.monotonic() >= self._due)
        if due:
            self._due = time.monotonic() + self._every.seconds
        return due

    def save(self, block: bool = False) -> None:
        """Take a checkpoint of everything the run knows of.

        Raises:
            RuntimeError: the run has no folder for checkpoints.
            paceline.train.checkpoint.CheckpointError: this one or the one before could not be written.
        """
        if self._store is None:
            raise RuntimeError("there is no folder for checkpoints; pass checkpoint_dir= to paceline.init")
        with self.metrics.checkpointing():
            progress = {
                "epoch": self.epoch,
                "step": self.done,
                "loaders": [loader.state_dict() for loader in self.loaders],
            }
            shared = {name: thing.state_dict() for name, thing in self._run.stateful().items()}
            self._store.save(self.done, {**shared, "progress": progress}, _random_states(), block=block)

    def resume(self) -> bool:
        """Go to where the newest checkpoint was taken; returns whether there is one."""
        saved = self._store.load(self._run.device) if self._store is not None else None
        if saved is None:
            return False
        progress = saved.shared_state["progress"]
        _check_parts(self._run.stateful(), saved.shared_state, len(self.loaders), len(progress["loaders"]))
        for name, thing in self._run.stateful().items():
            thing.load_state_dict(saved.shared_state[name])
        for loader, state in zip(self.loaders, progress["loaders"], strict=True):
            loader.load_state_dict(state)
        self.epoch, self.done = progress["epoch"], progress["step"]
        self.metrics.resumed(self.epoch, self.done)
        if saved.rank_state is not None and saved.world_size == self._run.world_size:
            _set_random_states(saved.rank_state)
        return True

    def close(self) -> None:
        """Write what is left, wait for a checkpoint under way."""
        self.metrics.close()
        if self._store is not None:
            self._store.close()
        if isinstance(self._exchange, SocketExchange):
            self._exchange.close()


def _check_parts(here: Mapping[str, Any], saved: Mapping[str, Any], loaders: int, saved_loaders: int) -> None:
    missing = sorted(set(here) - set(saved))
    surplus = sorted(set(saved) - set(here) - {"progress"})
    if missing or surplus or loaders != saved_loaders:
        raise RuntimeError(
            f"the checkpoint does not fit this script: it lacks {missing or 'nothing'}, has {surplus or 'nothing'} "
            f"more, and {saved_loaders} loaders instead of {loaders}; take another checkpoint_dir for another script"
        )


def _length(loader: Loader) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _random_states() -> dict[str, Any]:
    """The states of this rank's generators."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        states["numpy"] = numpy_random.get_state()
    return states


def _set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None and "numpy" in states:
        numpy_random.set_state(states["numpy"])


def run_folder() -> Path | None:
    """The job's folder on this machine, when `paceline run` started the rank."""
    folder = os.environ.get("PACELINE_RUN_DIR")
    return Path(folder) if folder else None
