"""`stream.py PAIRS FILE`: an epoch of a stream with four workers, by the library's loader and by torch's, in turns.

The stream splits itself over workers, as torch's documentation advises; making an element takes about 0.2 ms. Workers
are persistent, so their start is not measured. Writes a list of pairs to FILE: seconds, and seconds of CPU time
including that of the workers.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.train.data.make_loader import make_loader

ELEMENTS = 8192
BATCH_SIZE = 64
WORKERS = 4


class Stream(IterableDataset[torch.Tensor]):
    """Elements that take some work."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for number in range(first, ELEMENTS, step):
            yield torch.full((64, 64), float(number)).sin_().cumsum_(0)


def cpu() -> float:
    """Seconds of CPU of this process and its children."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    fields = [Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split() for child in children]
    ticks = sum(int(field[11]) + int(field[12]) for field in fields)
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def epoch(loader: Any) -> tuple[float, float]:
    began, used = time.perf_counter(), cpu()
    elements = sum(len(batch) for batch in loader)
    assert elements == ELEMENTS, elements
    return time.perf_counter() - began, cpu() - used


def main(pairs: int, file: str) -> None:
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_workers": WORKERS, "persistent_workers": True}
    loaders = make_loader(Stream(), **options), DataLoader(Stream(), **options)
    for loader in loaders:
        epoch(loader)
    measured = []
    for number in range(pairs):  # each side is first in every other pair
        order = (0, 1) if number % 2 else (1, 0)
        seconds = {which: epoch(loaders[which]) for which in order}
        measured.append((seconds[0], seconds[1]))
    Path(file).write_text(json.dumps(measured))


main(int(sys.argv[1]), sys.argv[2])
