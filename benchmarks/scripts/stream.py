"""`stream.py PAIRS FILE`: an epoch of a stream with four workers, by the library's loader and by torch's, in turns.

The stream splits itself over workers, as torch's documentation advises; making an element takes some 0.2 ms. Workers
are kept, so starting them is not part of it. Writes a list of pairs of seconds to FILE.
"""

import json
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


def epoch(loader: Any) -> float:
    began = time.perf_counter()
    elements = sum(len(batch) for batch in loader)
    assert elements == ELEMENTS, elements
    return time.perf_counter() - began


def main(pairs: int, file: str) -> None:
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_workers": WORKERS, "persistent_workers": True}
    loaders = make_loader(Stream(), **options), DataLoader(Stream(), **options)
    for loader in loaders:
        epoch(loader)
    measured = [tuple(map(epoch, loaders)) for _ in range(pairs)]
    Path(file).write_text(json.dumps(measured))


main(int(sys.argv[1]), sys.argv[2])
