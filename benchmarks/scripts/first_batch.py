"""`first_batch.py paceline|torch SIZE POSITION FILE`: from making a loader until its first batch, for rank 0 of two.

The data set is the numbers below SIZE, shuffled. If POSITION is not 0, the library loads this position, and torch skips
the batches before it, by their indices only, without reading a sample. Writes the seconds and the peak growth of the
process in megabytes to FILE.
"""

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from paceline.train.data.make_loader import make_loader

RANKS = 2
BATCH_SIZE = 64  # per rank


class SkippedBatches:
    """The batches of a batch sampler without the first ones."""

    def __init__(self, batches: BatchSampler, skipped: int) -> None:
        self._batches = batches
        self._skipped = skipped

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(iter(self._batches), self._skipped, None)


def with_library(size: int, position: int) -> Any:
    loader = make_loader(range(size), batch_size=BATCH_SIZE, shuffle=True, rank=0, world_size=RANKS)
    if position:
        loader.load_state_dict({**loader.state_dict(), "position": position})
    return next(iter(loader))


def with_torch(size: int, position: int) -> Any:
    data = range(size)
    sampler = DistributedSampler(data, num_replicas=RANKS, rank=0)  # type: ignore[arg-type]
    batches = BatchSampler(sampler, BATCH_SIZE, drop_last=False)
    rest = SkippedBatches(batches, position // (BATCH_SIZE * RANKS))
    return next(iter(DataLoader(data, batch_sampler=rest)))  # type: ignore[arg-type]


def memory(name: str) -> float:
    """A line of this process's memory, in megabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(f"{name}:"))


def main(who: str, size: int, position: int, file: str) -> None:
    first_batch = {"paceline": with_library, "torch": with_torch}[who]
    first_batch(1000, 500 if position else 0)  # so that what torch loads at its first use is not measured
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = memory("VmRSS")
    began = time.perf_counter()
    batch = first_batch(size, position)
    seconds = time.perf_counter() - began
    assert len(batch) == BATCH_SIZE
    Path(file).write_text(json.dumps({"seconds": seconds, "megabytes": memory("VmHWM") - before}))


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
