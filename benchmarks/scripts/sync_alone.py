"""`sync_alone.py METHOD FILE`: the seconds of a step with 21 MB of gradients, with one way to exchange them.

METHOD is as in `sync_step.py`. Rank 0 writes the median of some windows to FILE. A window has as many steps as a cycle
of `diloco(64)`, so it has one exchange of everything.
"""

import json
import statistics
import sys
import time
from pathlib import Path

from sync_step import trainer

import paceline

WINDOWS, STEPS = 3, 64


def main(what: str, file: str) -> None:
    with paceline.init(seed=0) as run:
        step = trainer(run, what)
        seconds = []
        for _ in range(1 + WINDOWS):
            run.barrier()
            began = time.perf_counter()
            for _ in range(STEPS):
                step()
            seconds.append((time.perf_counter() - began) / STEPS)
        if run.is_main:
            Path(file).write_text(json.dumps(statistics.median(seconds[1:])))


if __name__ == "__main__":
    main(*sys.argv[1:])
