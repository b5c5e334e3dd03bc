"""`one_rank.py PAIRS tensors|own FILE`: the seconds of a short step of one rank, with the library and with torch alone.

Both train in this process, in turns of one epoch of 100 steps, with 64 samples per step of a `TensorDataset`, or of a
data set of the script's own, of which each sample is read by itself. Writes a list of pairs to FILE: seconds per step,
and seconds of CPU time.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import paceline

STEPS, BATCH = 100, 64


class Own(Dataset[tuple[Tensor, Tensor]]):
    """Samples of tensors, one by one."""

    def __init__(self, *tensors: Tensor) -> None:
        self.x, self.y = tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


DATA: dict[str, Callable[..., Dataset[Any]]] = {"tensors": TensorDataset, "own": Own}


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, torch.optim.SGD(model.parameters(), 0.01)


def step(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def with_library(run: paceline.Run, data: Dataset[Any]) -> Iterator[None]:
    """Train forever; pauses after each epoch."""
    model, optimizer = run.setup(*build())
    train = run.dataloader(data, BATCH, shuffle=True)
    for _ in run.epochs(sys.maxsize):
        for batch in train:
            run.backward(step(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        yield


def by_hand(data: Dataset[Any]) -> Iterator[None]:
    """The same with torch alone."""
    model, optimizer = build()
    train = DataLoader(data, BATCH, shuffle=True)
    while True:
        for batch in train:
            step(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        yield


def epoch(training: Iterator[None]) -> tuple[float, float]:
    """Seconds per step, and those of CPU time."""
    began, used = time.perf_counter(), time.process_time()
    next(training)
    return (time.perf_counter() - began) / STEPS, (time.process_time() - used) / STEPS


def main(pairs: int, kind: str, file: str) -> None:
    torch.set_num_threads(1)
    data = DATA[kind](torch.randn(STEPS * BATCH, 32), torch.randint(10, (STEPS * BATCH,)))
    with paceline.init(seed=0, progress=False) as run:
        sides = with_library(run, data), by_hand(data)
        for training in sides:
            epoch(training)
        measured = []
        for number in range(pairs):  # each side is first in every other pair
            order = (0, 1) if number % 2 else (1, 0)
            seconds = {which: epoch(sides[which]) for which in order}
            measured.append((seconds[0], seconds[1]))
    Path(file).write_text(json.dumps(measured))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
