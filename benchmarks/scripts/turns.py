"""Two ways to train, in the same ranks, in turns."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

import paceline

WINDOWS = 5


def finish(run: paceline.Run) -> None:
    """Wait until all ranks are here, and a GPU has done what it was given."""
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
    run.barrier()


def write_median(run: paceline.Run, ours: Callable[[], None], other: Callable[[], None], steps: int, file: str) -> None:
    """Take steps of both in turns, A B B A …, and write the seconds per step of the window with the median ratio."""
    _window(run, ours, other, steps)  # warm-up
    windows = sorted((_window(run, ours, other, steps) for _ in range(WINDOWS)), key=lambda pair: pair[0] / pair[1])
    if run.is_main:
        Path(file).write_text(json.dumps(windows[len(windows) // 2]))


def _window(run: paceline.Run, ours: Callable[[], None], other: Callable[[], None], steps: int) -> tuple[float, float]:
    """Seconds per step of each."""
    seconds = {ours: 0.0, other: 0.0}
    for number in range(steps):
        for step in (ours, other) if number % 2 else (other, ours):
            finish(run)
            began = time.perf_counter()
            step()
            if run.device.type == "cuda":
                torch.cuda.synchronize(run.device)
            seconds[step] += time.perf_counter() - began
    return seconds[ours] / steps, seconds[other] / steps
