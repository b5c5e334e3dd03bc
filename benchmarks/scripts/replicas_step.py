"""`replicas_step.py MEGABYTES FILE`: the seconds of a step whose ranks compare their replicas, and of one without.

Both train in the same ranks and take turns of some seconds, A B B A …, since most steps compare nothing. Rank 0 writes
for each of them seconds per step, and seconds of CPU time.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

import paceline

TURNS, SECONDS = 4, float(os.environ.get("TURN_SECONDS", "5"))
WIDTHS = {"0.1": (160, 1), "10": (800, 4), "100": (1800, 8)}  # of linear layers, and how many there are


class Training:
    """A model that trains."""

    def __init__(self, run: paceline.Run, size: str, replicas: str) -> None:
        width, layers = WIDTHS[size]
        torch.manual_seed(0)
        net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        strategy = paceline.Strategy(replicas=replicas)  # type: ignore[arg-type]
        self._run, self._batch = run, torch.randn(16, width)
        self._model, self._optimizer = run.setup(net, optimizer, strategy=strategy)

    def turn(self, steps: int) -> tuple[float, float, int]:
        """Seconds, those of CPU time, and steps."""
        self._run.barrier()
        began, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self._optimizer.zero_grad()
            self._run.backward(self._model(self._batch).square().mean())
            self._optimizer.step()
        return time.perf_counter() - began, time.process_time() - used, steps


def main(size: str, file: str) -> None:
    torch.set_num_threads(1)
    run = paceline.init(progress=False)
    both = {replicas: Training(run, size, replicas) for replicas in ("check", "off")}
    seconds, _, steps = [training.turn(10) for training in both.values()][1]
    count = int(run.all_reduce(max(8.0, SECONDS * steps / seconds), "min"))
    for training in both.values():
        training.turn(count)  # how often to compare is chosen from these
    sums = dict.fromkeys(both, (0.0, 0.0, 0))
    for number in range(2 * TURNS):
        one = ("check", "off", "off", "check")[number % 4]
        sums[one] = tuple(a + b for a, b in zip(sums[one], both[one].turn(count), strict=True))  # type: ignore[assignment]
    if run.is_main:
        Path(file).write_text(json.dumps([(seconds / steps, used / steps) for seconds, used, steps in sums.values()]))
    run.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
