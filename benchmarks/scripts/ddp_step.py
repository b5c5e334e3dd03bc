"""`ddp_step.py MODEL plain|log FILE`: the seconds of a step with the library and with hand-written DDP.

Both train in the same ranks and take turns step by step, A B B A …, so that anything that slows the machine or these
processes slows both. Times are summed over a window of steps of each. Rank 0 writes the times of the window with the
median ratio to FILE.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from training import WORK, by_hand, with_library
from turns import finish

import paceline

WINDOWS = {"digits": 15, "chargpt": 5, "100mb": 3}
STEPS = {"digits": 23, "chargpt": 10, "100mb": 4}  # in a window; the epoch of digits, so that each starts one


def take_step(run: paceline.Run, training: Iterator[Any]) -> float:
    """Seconds of one step, which all ranks begin together."""
    finish(run)
    began = time.perf_counter()
    next(training)
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
    return time.perf_counter() - began


def measure_window(run: paceline.Run, ours: Iterator[Any], other: Iterator[Any], steps: int) -> tuple[float, float]:
    """Seconds per step of each."""
    seconds = {ours: 0.0, other: 0.0}
    for step in range(steps):
        for training in (ours, other) if step % 2 else (other, ours):
            seconds[training] += take_step(run, training)
    return seconds[ours] / steps, seconds[other] / steps


def main(name: str, kind: str, file: str) -> None:
    run = paceline.init(seed=0)
    work, log = WORK[name](), kind == "log"
    ours, other = with_library(run, work, log=log), by_hand(run, work, log=log)
    measure_window(run, ours, other, STEPS[name])  # warm-up
    windows = sorted(
        (measure_window(run, ours, other, STEPS[name]) for _ in range(WINDOWS[name])),
        key=lambda pair: pair[0] / pair[1],
    )
    if run.is_main:
        Path(file).write_text(json.dumps(windows[len(windows) // 2]))
    run.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
