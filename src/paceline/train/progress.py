"""How far the epoch is: a bar where a terminal shows this rank's output, else a plain line now and then."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

_BAR_EVERY = 0.5  # seconds between two looks of a bar
_LINE_EVERY = 30.0  # seconds between two plain lines
_WINDOW = 30.0  # seconds over which rates are taken, about


class Progress:
    """Shows the epoch, the steps done and to do, the last metrics, samples a second, and the time left."""

    def __init__(self) -> None:
        self._view: _View | None = None
        self._label = ""
        self._means: dict[str, float] = {}
        self._steps: int | None = None
        self._done = self._samples = 0
        self._began = self._next = 0.0
        self._window: list[tuple[float, int, int]] = []  # when, and what was done then: steps, samples

    def begin(self, epoch: int, epochs: int | None, steps: int | None, done: int) -> None:
        """An epoch begins, or what is left of it.

        Args:
            epoch: counted from 0.
            epochs: how many there will be; None where nobody knows.
            steps: of the whole epoch; None where nobody knows.
            done: steps of it that were done before.
        """
        self.close()
        self._label = f"epoch {epoch + 1}/{epochs}" if epochs is not None else f"epoch {epoch + 1}"
        self._steps, self._done, self._samples = steps, done, 0
        self._view = _make_view(self._label, steps, done)
        self._began = time.monotonic()
        self._next = self._began + self._view.every
        self._window = [(self._began, done, 0)]

    def step_done(self, samples: int) -> None:
        """Another step is done.

        Args:
            samples: of all ranks together.
        """
        self._done += 1
        self._samples += samples
        now = time.monotonic()
        if now >= self._next and self._view is not None:
            self._next = now + self._view.every
            self._view.show(self._done, self._text(now))

    def measured(self, means: Mapping[str, float]) -> None:
        """There are new metrics to show."""
        self._means.update(means)

    def end(self) -> None:
        """The epoch is over: its last line stays."""
        now = time.monotonic()
        if self._view is not None and self._samples:
            seconds = max(now - self._began, 1e-9)
            text = self._join(f"{_number(self._samples / seconds)} samples/s", f"in {_duration(seconds)}")
            self._view.show(self._done, text)
        self.close()

    def close(self) -> None:
        """Leave the line as it is."""
        if self._view is not None:
            self._view.close()
            self._view = None

    def _text(self, now: float) -> str:
        """What stands behind the steps: metrics, rate, time left."""
        then, done, samples = self._window[0]
        seconds = max(now - then, 1e-9)
        rate = (self._samples - samples) / seconds
        parts = [f"{_number(rate)} samples/s"]
        if self._steps is not None and self._done > done:
            parts.append(f"{_duration((self._steps - self._done) * seconds / (self._done - done))} left")
        self._window.append((now, self._done, self._samples))
        while now - self._window[0][0] > _WINDOW and len(self._window) > 1:
            del self._window[0]
        return self._join(*parts)

    def _join(self, *parts: str) -> str:
        return " ".join([*(f"{name} {value:.4g}" for name, value in self._means.items()), *parts])


class _View(Protocol):
    """How progress is drawn."""

    every: float  # seconds between two calls of `show`

    def show(self, done: int, text: str) -> None: ...
    def close(self) -> None: ...


class _Lines:
    """Plain lines, for files and pipes."""

    every = _LINE_EVERY

    def __init__(self, label: str, steps: int | None) -> None:
        self._label, self._steps = label, steps

    def show(self, done: int, text: str) -> None:
        steps = f"{done}/{self._steps}" if self._steps is not None else f"{done}"
        print(f"{self._label} step {steps} {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class _Bar:
    """A bar of tqdm."""

    every = _BAR_EVERY

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def show(self, done: int, text: str) -> None:
        self._bar.n = done
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


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
    """Whether a terminal shows what this rank writes: `paceline run` says so of the file that it copies there."""
    said = os.environ.get("TTY_INTERACTIVE")
    return said == "1" if said in ("0", "1") else sys.stderr.isatty()


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _duration(seconds: float) -> str:
    """`1.2 s`, `0:12`, `5:00`, `1:00:00`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
