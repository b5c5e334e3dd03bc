"""`shard_loss.py ARCHITECTURE RANKS FILE`: the losses of a training of 100 steps with AdamW, with sharding or alone.

Run by `paceline run`, it trains with `Strategy(shard=True)`. With `python`, it is torch alone, in one process, which
computes the parts of each batch that RANKS would have one after the other: batch norm takes the mean of a part. Rank 0
writes the seconds, and the mean loss of each step, to FILE.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from architectures import ARCHITECTURES
from torch import Tensor
from torch.nn.functional import cross_entropy

import paceline

BATCH, STEPS, SEED = 16, 100, 7
WIDTHS, DEPTH = {"mlp": 256, "convnet": 32}, 3  # others have a width of 64


def batches(name: str) -> list[tuple[Tensor, Tensor]]:
    """Of all ranks together."""
    kind, numbers = ARCHITECTURES[name], torch.Generator().manual_seed(SEED)
    made = []
    for _ in range(STEPS):
        x = torch.stack([kind.sample(numbers) for _ in range(BATCH)])
        x = x[:, : WIDTHS[name]] if name == "mlp" else x
        y = torch.randint(kind.classes, (BATCH,), generator=numbers)
        made.append((x, y))
    return made


def build(name: str) -> torch.nn.Module:
    return ARCHITECTURES[name].build(width=WIDTHS.get(name, 64), depth=DEPTH)


def alone(name: str, ranks: int) -> list[float]:
    torch.manual_seed(SEED)
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for x, y in batches(name):
        total = 0.0
        for part, expected in zip(x.chunk(ranks), y.chunk(ranks), strict=True):
            loss = cross_entropy(model(part), expected) / ranks
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def sharded(name: str, run: paceline.Run) -> list[float]:
    with run.build():
        model = build(name)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(shard=True))
    losses = []
    for x, y in batches(name):
        loss = cross_entropy(model(x.chunk(run.world_size)[run.rank]), y.chunk(run.world_size)[run.rank])
        run.backward(loss)
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return [run.mean(loss, 1) for loss in losses]


def timed(train: Callable[[], list[float]]) -> str:
    began = time.perf_counter()
    losses = train()
    return json.dumps([time.perf_counter() - began, losses])


def main(name: str, ranks: str, file: str) -> None:
    if "RANK" not in os.environ:
        Path(file).write_text(timed(lambda: alone(name, int(ranks))))
        return
    with paceline.init(seed=SEED) as run:
        found = timed(lambda: sharded(name, run))
        if run.is_main:
            Path(file).write_text(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
