"""`watched.py FILE`: the seconds of a step of 0.4 ms with torch alone, while the job's agent watches and not.

The agent is stopped (SIGSTOP) where it is not to watch: it has nothing else to do. Both take turns of two seconds,
A B B A …, eight turns of each. Writes to FILE, for each of them: seconds per step, and seconds of CPU time.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from one_rank import BATCH, STEPS, by_hand
from torch.utils.data import TensorDataset

TURNS, SECONDS = 8, 2.0


def turn(training: Iterator[None]) -> tuple[float, float, int]:
    """Seconds, those of CPU time, and steps of one turn."""
    began, used, steps = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < SECONDS:
        next(training)
        steps += STEPS
    return time.perf_counter() - began, time.process_time() - used, steps


def main(file: str) -> None:
    torch.set_num_threads(1)
    agent = json.loads(Path(os.environ["PACELINE_RUN_DIR"], "status.json").read_text())["agent"]["pid"]
    training = by_hand(TensorDataset(torch.randn(STEPS * BATCH, 32), torch.randint(10, (STEPS * BATCH,))))
    turn(training)
    sums = {True: (0.0, 0.0, 0), False: (0.0, 0.0, 0)}
    for number in range(2 * TURNS):
        is_watched = number % 4 in (0, 3)
        os.kill(agent, signal.SIGCONT if is_watched else signal.SIGSTOP)
        seconds, used, steps = (a + b for a, b in zip(sums[is_watched], turn(training), strict=True))
        sums[is_watched] = seconds, used, int(steps)
    os.kill(agent, signal.SIGCONT)
    Path(file).write_text(json.dumps([(seconds / steps, used / steps) for seconds, used, steps in sums.values()]))


main(sys.argv[1])
