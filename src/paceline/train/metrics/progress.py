"""The progress of the epoch: on the screen, and in a file that `paceline get` reads."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from paceline.contract.records import ReplicasRecord, SyncRecord

_BAR_EVERY = 0.5  # seconds between two updates of a bar
_LINE_EVERY = 30.0  # seconds between two plain lines
_FILE_EVERY = 1.0  # seconds between two writes of the file
_WINDOW = 30.0  # seconds over which rates are averaged, approximately


@dataclass(frozen=True)
class Moment:
    """The current progress of the epoch."""

    epoch: int  # counted from 0
    epochs: int | None  # number of epochs; None if unknown
    done: int  # steps of the epoch that are done
    steps: int | None  # steps of the whole epoch; None if unknown
    rate: float  # samples per second of all ranks together
    epoch_seconds_left: float | None  # seconds that the rest of the epoch takes at this rate; None if unknown
    seconds_left: float | None  # the same for all epochs, without the time between them
    took: float | None  # seconds that the epoch took, when its loop has ended or was left
    means: Mapping[str, float]  # the last metrics, of this epoch or an earlier one
    epoch_means: Mapping[str, float]  # those of this epoch
    sync: SyncRecord | None  # what the exchange costs; None if unknown, or if there is none
    replicas: ReplicasRecord | None  # how often all ranks were equal; None if they were not compared yet
    began: float | None  # when the first loop of this process began, in seconds since the epoch; None without one
    steps_per_minute: float | None  # over the same time as `rate`


class Progress:
    """Counts steps and samples, and regularly shows the last metrics, samples per second, and the time left.

    Metrics that come after the loop over an epoch's batches, as those of an evaluation, are shown at once, on a line of
    their own. What the screen shows of an epoch was logged in it.
    """

    def __init__(
        self, *, screen: bool, file: Path | None, replicas: Callable[[], ReplicasRecord | None] = lambda: None
    ) -> None:
        self._screen, self._replicas = screen, replicas
        self._file = None if file is None else _File(file)
        self._views: list[_View] = []  # those of the loop under way
        self._label = ""
        self._epoch = 0
        self._epochs: int | None = None
        self._means: dict[str, float] = {}
        self._epoch_means: dict[str, float] = {}
        self._last: Moment | None = None  # the last progress of this epoch's loop
        self._sync: SyncRecord | None = None
        self._steps: int | None = None
        self._resumed_at = self._done = self._samples = 0
        self._began = self._next = self._first = 0.0
        self._window: list[tuple[float, int, int]] = []  # time, and the steps and samples done by then

    def epoch_begins(self, epoch: int, epochs: int | None) -> None:
        """Start an epoch, in which a loop over batches may follow."""
        self.leave()
        self._epoch, self._epochs = epoch, epochs
        self._label = f"epoch {epoch + 1}/{epochs}" if epochs is not None else f"epoch {epoch + 1}"
        self._epoch_means, self._last = {}, None

    def begin(self, epoch: int, epochs: int | None, steps: int | None, done: int) -> None:
        """Start the loop over an epoch's batches, or the rest of it."""
        self.epoch_begins(epoch, epochs)
        self._steps, self._resumed_at, self._done, self._samples = steps, done, done, 0
        self._began, self._first = time.monotonic(), self._first or time.time()
        self._window = [(self._began, done, 0)]
        if self._screen:
            self._views.append(_make_view(self._label, steps, done))
        if self._file is not None:
            self._views.append(self._file)
        for view in self._views:
            view.next = self._began + view.every
        self._next = min((view.next for view in self._views), default=math.inf)

    def step_done(self, samples: int) -> None:
        self._done += 1
        self._samples += samples
        now = time.monotonic()
        if now >= self._next:
            moment = self._moment(now)
            for view in self._views:
                if now >= view.next:
                    view.next = now + view.every
                    view.show(moment)
            self._next = min((view.next for view in self._views), default=math.inf)

    def measured(self, means: Mapping[str, float], sync: SyncRecord | None = None) -> None:
        """Set new metrics to show, and what the exchange costs, if that is known."""
        self._means.update(means)
        self._epoch_means.update(means)
        self._sync = sync or self._sync
        if means and not self._views:
            self._show_after_loop(means)

    def end(self) -> None:
        """End the loop over the epoch's batches: its last line stays on the screen."""
        self._end(is_over=True)

    def leave(self) -> None:
        """End a loop that was left: its last line stays on the screen."""
        if self._views:
            self._end(is_over=False)

    def close(self) -> None:
        """Leave the loop, if it was not left yet, and wait until the file is written. Another epoch may follow."""
        self.leave()
        if self._file is not None:
            if self._last is not None and self._last.replicas != self._replicas():  # compared at the end
                self._last = replace(self._last, replicas=self._replicas())
                self._file.show(self._last)
            self._file.finish()

    def _end(self, *, is_over: bool) -> None:
        views, self._views = self._views, []
        if self._done > self._resumed_at:
            self._last = self._moment(time.monotonic(), has_ended=True, is_over=is_over)
            for view in views:
                view.show(self._last)
        for view in views:
            view.close()
        if self._last is None and self._epoch_means:  # logged in the first step, which was not completed
            self._show_after_loop(self._epoch_means)

    def _show_after_loop(self, means: Mapping[str, float]) -> None:
        """Show metrics that have come when the loop had ended, or without one."""
        if self._screen:
            print(" ".join(filter(None, (self._label, *_values(means)))), file=sys.stderr, flush=True)
        if self._last is None and not self._first:  # the script has no loop of ours: nothing counts its steps
            self._last = self._moment(time.monotonic(), has_ended=True)
        if self._file is not None and self._last is not None:
            self._last = replace(self._last, means=dict(self._means), sync=self._sync)
            self._file.show(self._last)

    def _moment(self, now: float, *, has_ended: bool = False, is_over: bool = False) -> Moment:
        """The progress after at least one step; when the loop has ended, with the rate of the whole loop."""
        then, done, samples = (self._began, self._resumed_at, 0) if has_ended else self._window[0]
        seconds = max(now - then, 1e-9)
        step_seconds = seconds / (self._done - done) if self._done > done else None
        steps = self._done if is_over else self._steps
        epoch_seconds_left = seconds_left = None
        if steps is not None and step_seconds is not None:
            epoch_seconds_left = max(0, steps - self._done) * step_seconds
            if self._epochs is not None:
                seconds_left = epoch_seconds_left + (self._epochs - self._epoch - 1) * steps * step_seconds
        self._window.append((now, self._done, self._samples))
        while now - self._window[0][0] > _WINDOW and len(self._window) > 1:
            del self._window[0]
        return Moment(
            epoch=self._epoch, epochs=self._epochs, done=self._done, steps=self._steps,
            rate=(self._samples - samples) / seconds, epoch_seconds_left=epoch_seconds_left, seconds_left=seconds_left,
            took=seconds if has_ended else None, means=dict(self._means), epoch_means=dict(self._epoch_means),
            sync=self._sync, replicas=self._replicas(), began=self._first or None,
            steps_per_minute=60 / step_seconds if step_seconds else None,
        )  # fmt: skip


class _View:
    """Where progress is shown."""

    every: float  # seconds between two calls of `show`
    next = 0.0  # time of the next call

    def show(self, moment: Moment) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """The loop has ended: nothing more is shown of it."""


class _Lines(_View):
    """Plain lines, for files and pipes."""

    every = _LINE_EVERY

    def __init__(self, label: str, steps: int | None) -> None:
        self._label, self._steps = label, steps

    def show(self, moment: Moment) -> None:
        steps = f"{moment.done}/{self._steps}" if self._steps is not None else f"{moment.done}"
        print(f"{self._label} step {steps} {_text(moment)}", file=sys.stderr, flush=True)


class _Bar(_View):
    """A progress bar of tqdm."""

    every = _BAR_EVERY

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def show(self, moment: Moment) -> None:
        self._bar.n = moment.done
        self._bar.set_postfix_str(_text(moment), refresh=False)
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


class _File(_View):
    """A JSON file, replaced atomically, in a separate thread, since a disk may be slow.

    If it cannot be written, that is not an error.
    """

    every = _FILE_EVERY

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._new = str(path.with_name(f".{path.name}.{os.getpid()}"))
        self._latest: Moment | None = None
        self._written: Moment | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._is_writing = False

    def show(self, moment: Moment) -> None:
        with self._lock:
            self._latest = moment
            if self._is_writing:  # the disk is slow: this is written next, unless a later one replaces it
                return
            self._is_writing = True
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "paceline-progress")
        try:
            self._thread.submit(self._write)
        except RuntimeError:  # Python is shutting down: its executors take no more work
            self._write()

    def finish(self) -> None:
        """Wait until the latest progress is written."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _write(self) -> None:
        """Write until the latest progress is written."""
        while True:
            with self._lock:
                moment = self._latest
                if moment is None or moment is self._written:
                    self._is_writing = False
                    return
                self._written = moment
            self._replace(moment)

    def _replace(self, moment: Moment) -> None:
        text = json.dumps(
            {
                "time": time.time(),
                "epoch": moment.epoch,
                "epochs": moment.epochs,
                "step": moment.done,
                "steps": moment.steps,
                "samples_per_second": round(moment.rate, 3),
                "epoch_seconds_left": _rounded(moment.epoch_seconds_left),
                "seconds_left": _rounded(moment.seconds_left),
                "sync": moment.sync,
                "replicas": moment.replicas,
                **({} if moment.began is None else {"began": moment.began}),
                "steps_per_minute": _rounded(moment.steps_per_minute),
                "metrics": {n: value if math.isfinite(value) else None for n, value in moment.means.items()},
            }
        )
        try:
            with open(self._new, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(text)
            os.replace(self._new, self._path)
        except OSError:  # the disk is full, or the folder is gone
            with contextlib.suppress(OSError):
                os.unlink(self._new)


def _make_view(label: str, steps: int | None, done: int) -> _View:
    if _is_terminal():
        try:
            from tqdm import tqdm  # type: ignore[import-untyped]
        except ImportError:
            return _Lines(label, steps)
        return _Bar(
            tqdm(
                desc=label,
                total=steps,
                initial=done,
                file=sys.stderr,
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}" if steps else "{desc}: {n_fmt} steps{postfix}",
            )
        )
    return _Lines(label, steps)


def _is_terminal() -> bool:
    """Whether a terminal shows this rank's output: with `paceline run`, a file that is copied to the terminal."""
    interactive = os.environ.get("TTY_INTERACTIVE")
    return interactive == "1" if interactive in ("0", "1") else sys.stderr.isatty()


def _text(moment: Moment) -> str:
    """The text after the steps: metrics, rate, time left or taken."""
    parts = [*_values(moment.epoch_means), f"{_number(moment.rate)} samples/s"]
    if moment.took is not None:
        parts.append(f"in {_duration(moment.took)}")
    elif moment.epoch_seconds_left is not None:
        parts.append(f"{_duration(moment.epoch_seconds_left)} left")
    return " ".join(parts)


def _values(means: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in means.items()]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _duration(seconds: float) -> str:
    """`1.2 s`, `0:12`, `5:00`, `1:00:00`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
