"""What happens between two batches: steps are counted and timed, checkpoints taken, metrics written."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .checkpoint import CheckpointStore, SingleExchange, SocketExchange

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
        for batch in self.loader:
            self._steps.begin(self.loader)
            yield batch
            self._steps.end()


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
        done: batches trained on, over all attempts.
    """

    def __init__(self, run: Run, folder: Path | None, every: Interval | None, keep: int, log_file: Path | None) -> None:
        self.epoch = 0
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
        self.metrics = Metrics(run, log_file)

    @property
    def saves(self) -> bool:
        """Whether checkpoints are taken without being asked for."""
        return self._every is not None and self._store is not None

    def begin(self, loader: Loader) -> None:
        """A batch of `loader` was handed out."""
        self.weight = loader.weight
        self.metrics.data_came()

    def end(self) -> None:
        """The step is done: the optimizer has stepped, and the next batch is asked for."""
        self.done += 1
        self.weight = 1.0
        self.metrics.step_done(self.epoch, self.done)
        if self._is_due():
            self.save()

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
        began = time.monotonic()
        progress = {
            "epoch": self.epoch,
            "step": self.done,
            "loaders": [loader.state_dict() for loader in self.loaders],
        }
        shared = {name: thing.state_dict() for name, thing in self._run.stateful().items()}
        self._store.save(self.done, {**shared, "progress": progress}, _random_states(), block=block)
        self.metrics.add_time("checkpoint", time.monotonic() - began)

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


class Metrics:
    """Means over ranks and steps of what `Run.log` is given, and the times of steps, as lines of metrics.jsonl.

    Ranks talk once in `EVERY` steps, so all must log the same names in the same steps.
    """

    EVERY = 10

    def __init__(self, run: Run, path: Path | None) -> None:
        self._run = run
        self._path = path if run.is_main else None
        self._values: dict[str, list[Any]] = {}
        self._times: dict[str, float] = {}
        self._steps = 0
        self._last = time.monotonic()
        self._where = (0, 0)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def log(self, values: Mapping[str, Any]) -> None:
        """Remember values of this step; tensors are not waited for."""
        for name, value in values.items():
            kept = value.detach() if isinstance(value, torch.Tensor) else float(value)
            self._values.setdefault(name, []).append(kept)

    def data_came(self) -> None:
        """The loop has got its batch: what passed since the step before was waiting for data."""
        self.add_time("data", time.monotonic() - self._last)
        self._last = time.monotonic()

    def step_done(self, epoch: int, step: int) -> None:
        """The loop has asked for another batch: what passed since it got the last was the step."""
        now = time.monotonic()
        self.add_time("step", now - self._last)
        self._last = now
        self._steps += 1
        self._where = (epoch, step)
        if self._steps == self.EVERY:
            self.flush()

    def add_time(self, what: str, seconds: float) -> None:
        """Seconds that went into a part of the steps since the last line."""
        self._times[what] = self._times.get(what, 0.0) + seconds

    def flush(self) -> None:
        """Reduce what was logged since the last line, and write the next."""
        if not self._steps:
            return
        names = sorted(self._values)
        sums = [sum(float(v) for v in self._values[n]) for n in names]
        counts = [float(len(self._values[n])) for n in names]
        reduced = self._run.all_reduce(torch.tensor([sums, counts], dtype=torch.float64)) if names else None
        if self._path is not None:
            epoch, step = self._where
            times = {f"{what}_seconds": seconds / self._steps for what, seconds in self._times.items()}
            means = {} if reduced is None else dict(zip(names, (reduced[0] / reduced[1]).tolist(), strict=True))
            line = {"time": time.time(), "epoch": epoch, "step": step, **means, **times}
            with open(self._path, "a") as file:
                file.write(json.dumps(line) + "\n")
        self._values.clear()
        self._times.clear()
        self._steps = 0

    def close(self) -> None:
        """Write the last line."""
        self.flush()


def _check_parts(here: Mapping[str, Any], saved: Mapping[str, Any], loaders: int, saved_loaders: int) -> None:
    missing = sorted(set(here) - set(saved))
    surplus = sorted(set(saved) - set(here) - {"progress"})
    if missing or surplus or loaders != saved_loaders:
        raise RuntimeError(
            f"the checkpoint does not fit this script: it lacks {missing or 'nothing'}, has {surplus or 'nothing'} "
            f"more, and {saved_loaders} loaders instead of {loaders}; take another checkpoint_dir for another script"
        )


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
