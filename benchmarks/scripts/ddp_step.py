"""`ddp_step.py MODEL plain|log FILE`: the seconds of a step with the library and with hand-written DDP.

Both train in the same ranks, in turns of a few steps, A B B A …, so that whatever slows the machine or these processes
slows both. Rank 0 writes the median of each side's turns to FILE.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training import WORK, by_hand, with_library

import paceline

WARM_UP = 2  # turns
TURNS = {"digits": (24, 23), "chargpt": (16, 5), "100mb": (10, 1)}  # how many, and steps in one; of digits an epoch


def take_turn(run: paceline.Run, training: Iterator[Any], steps: int) -> float:
    """Seconds a step."""
    run.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        next(training)
    return (time.perf_counter() - began) / steps


def main(name: str, kind: str, file: str) -> None:
    run = paceline.init(seed=0)
    work = WORK[name]()
    sides = {
        "paceline": with_library(run, work, log=kind == "log"),
        "other": by_hand(run.device, work, log=kind == "log"),
    }
    turns, steps = TURNS[name]
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(WARM_UP + turns):
        for side in sides if turn % 2 else reversed(sides):
            seconds[side].append(take_turn(run, sides[side], steps))
    if run.is_main:
        Path(file).write_text(json.dumps({side: statistics.median(each[WARM_UP:]) for side, each in seconds.items()}))
    run.close()


main(*sys.argv[1:])
