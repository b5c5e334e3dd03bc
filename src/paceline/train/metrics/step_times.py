"""The time of each part of a step: waiting for data, computing, exchanging gradients, optimizer, checkpoints."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTS = ("data", "forward_backward", "sync", "optimizer", "checkpoint", "total")
_OTHER = "other"  # time of a step that belongs to no part: it is only in the total
TOTALS: dict[str, float] = {}  # of all steps of this process that were read; `node/ranks/evidence.py` reads it


class CpuClock:
    """Marks points in time and measures the seconds between them; on the CPU, work is done when a call returns."""

    mark = staticmethod(time.perf_counter)

    def between(self, marks: Sequence[float]) -> list[float]:
        """Seconds from each mark to the next one."""
        return [later - earlier for earlier, later in itertools.pairwise(marks)]


class CudaClock:
    """The clock for training on a GPU: it measures when the GPU reached a mark, not when Python did.

    Time in which the GPU was idle counts for the part that Python was in.
    """

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        """Mark the current position in the current stream."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Seconds from each mark to the next one; waits until the GPU has reached the last."""
        marks[-1].synchronize()
        seconds = [earlier.elapsed_time(later) / 1000 for earlier, later in itertools.pairwise(marks)]
        self._free.extend(marks[:-1])
        return seconds


class StepTimes:
    """The steps since the last `read`, each as a sequence of laps: a lap is the time from one mark to the next.

    Laps follow each other without gaps. So the parts of a step never overlap, and the rest of the time belongs to none.
    """

    def __init__(self, clock: CpuClock | CudaClock, exchanges: bool) -> None:
        self._clock = clock
        self._exchanges = exchanges  # whether gradients are exchanged with other ranks
        self._marks: list[Any] = []
        self._laps: list[str] = []  # the part that each mark but the first ends
        self._ends: list[int] = []  # number of laps at the end of each step
        self._in_step = False
        self._now = _OTHER  # the part to which the time belongs until another begins

    def restart(self) -> None:
        """Start to measure here: discard the time since the last step, and steps that were not read."""
        self._laps.clear()
        self._ends.clear()
        self._marks = [self._clock.mark()]
        self._in_step = False

    def data_received(self) -> None:
        if not self._marks:
            self.restart()
        self._in_step = True
        self._lap("data")
        self._now = "forward_backward"

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor, **options: Any) -> None:
        """Compute the gradients of `loss * weight`, with autograd's `options`.

        The end of the computation and the end of the exchange are marked. The hook on the loss runs first in the
        backward pass, and so queues its callback before DDP queues the one that waits for the exchange. Both run when
        everything is computed, in this order.
        """
        if self._exchanges and self._in_step and loss.requires_grad:
            loss.register_hook(self._queue_mark)  # type: ignore[no-untyped-call]
        scale: torch.Tensor | None
        if isinstance(weight, torch.Tensor):
            scale = weight.to(loss.dtype).expand_as(loss)
        else:
            scale = None if weight == 1 else torch.full_like(loss, weight)
        torch.autograd.backward(loss, scale, **options)
        if self._in_step:
            self._lap("sync" if self._exchanges else "forward_backward")
            self._now = _OTHER

    def computed(self) -> None:
        """The gradients of a step are computed."""
        if self._in_step:
            self._lap("forward_backward")

    def exchanged(self) -> None:
        """They are exchanged."""
        if self._in_step:
            self._lap("sync")
            self._now = _OTHER

    def leave(self) -> None:
        """The loop was left: what follows is not part of a step."""
        self._in_step = False

    def _queue_mark(self, _: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self.computed)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(self._optimizer_begins)
        optimizer.register_step_post_hook(self._optimizer_ends)

    def watch_exchange(self, optimizer: torch.optim.Optimizer) -> None:
        """Time what other hooks exchange after the steps of an optimizer, registered after those of `watch`."""
        optimizer.register_step_post_hook(self._exchanged)

    def _exchanged(self, *_: Any) -> None:
        if self._in_step:
            self._lap("sync")

    def _optimizer_begins(self, *_: Any) -> None:
        if self._in_step:  # a loop that calls loss.backward() itself has computed and exchanged until here
            self._lap(self._now)
            self._now = "optimizer"

    def _optimizer_ends(self, *_: Any) -> None:
        if self._in_step:
            self._lap("optimizer")
            self._now = "forward_backward"

    def checkpoint_begins(self) -> None:
        if self._in_step:
            self._lap(_OTHER)

    def checkpoint_ends(self) -> None:
        if self._in_step:
            self._lap("checkpoint")

    def step_done(self) -> None:
        self._lap(_OTHER)
        self._ends.append(len(self._laps))
        self._in_step = False

    def _lap(self, part: str) -> None:
        self._marks.append(self._clock.mark())
        self._laps.append(part)

    def read(self) -> dict[str, list[float]]:
        """Seconds of each part in each step since the last call; on a GPU, waits for the steps to be done."""
        times: dict[str, list[float]] = {part: [0.0] * len(self._ends) for part in PARTS}
        laps = self._ends[-1] if self._ends else 0
        durations = self._clock.between(self._marks[: laps + 1]) if laps else []
        first = 0
        for step, end in enumerate(self._ends):
            for part, seconds in zip(self._laps[first:end], durations[first:end], strict=True):
                if part in times:
                    times[part][step] += seconds
                times["total"][step] += seconds
            first = end
        for part, row in times.items():
            TOTALS[part] = TOTALS.get(part, 0.0) + sum(row)
        TOTALS["steps"] = TOTALS.get("steps", 0.0) + len(self._ends)
        del self._laps[:laps], self._marks[:laps]
        self._ends.clear()
        return times


def make_clock(device: torch.device) -> CpuClock | CudaClock:
    """The clock for training on `device`."""
    return CudaClock() if device.type == "cuda" else CpuClock()
