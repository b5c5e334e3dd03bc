"""Models to train, and the same training loop twice: with the library, and with hand-written DDP.

Both loops are generators that pause after each step, so that they can take turns in the same ranks.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import paceline

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

LOG_EVERY = 10  # steps between two means of logged values over ranks, as in the library


@dataclass(frozen=True)
class Work:
    """A model to train.

    Attributes:
        build: makes the model, always with the same weights.
        loss: returns the loss of a model and a batch.
        batch_size: samples per step, over all ranks together.
        is_sharded: whether each rank keeps a part of the model, with the library.
    """

    build: Callable[[], nn.Module]
    dataset: Dataset[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    batch_size: int
    is_sharded: bool = False


def digits() -> Work:
    """The convnet of examples/digits.py: 151,000 parameters, 1,437 samples."""
    import digits as example

    train, _ = example.load_data()
    return Work(
        example.build_model, train, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), 64
    )


def chargpt() -> Work:
    """The transformer of examples/chargpt.py, with its defaults: 640,000 parameters."""
    import chargpt as example

    context = 64
    text, _ = example.load_text()
    pieces = text[: len(text) // (context + 1) * (context + 1)].view(-1, context + 1).long()
    return Work(
        lambda: example.CharGPT(context, layers=3, heads=4, width=128),
        TensorDataset(pieces),
        lambda model, batch: example.cross_entropy(model, batch[0]),
        32,
    )


def large(width: int = 2500, layers: int = 4) -> Work:
    """Square layers; these have 25 million parameters in total, 100 MB."""
    samples = TensorDataset(torch.randn(1024, width))

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    return Work(build, samples, lambda model, batch: model(batch[0]).square().mean(), 16)


class Small(nn.Module):
    """33,334 parameters of 10 elements: with the states of AdamW, and its step counts, 133,336 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.randn(10)) for _ in range(33_334))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the sum of all."""
        return x * torch.stack([*self.all]).sum(0)


def small() -> Work:
    """Many small tensors."""
    samples = TensorDataset(torch.randn(1024, 10))
    return Work(Small, samples, lambda model, batch: model(batch[0]).square().mean(), 16)


def blocks(width: int, depth: int) -> Work:
    """The model of the rows of sharded ones, see `blocks`."""
    import blocks as example

    words = TensorDataset(*example.make_batch(0, 1024))
    return Work(
        lambda: example.build(width, depth),
        words,
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        32,
        is_sharded=True,
    )


WORK = {
    "digits": digits, "chargpt": chargpt, "100mb": large, "3gb": functools.partial(large, 5000, 10), "small": small,
    "shard-2mb": functools.partial(blocks, 32, 12), "shard-200mb": functools.partial(blocks, 384, 12),
    "shard-1gb": functools.partial(blocks, 768, 15),
}  # fmt: skip


def with_library(run: paceline.Run, work: Work, *, log: bool = False) -> Iterator[dict[str, Any]]:
    """Train forever with the library; yields the model and the optimizer after each step."""
    model = work.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(shard=work.is_sharded))
    train = run.dataloader(work.dataset, global_batch_size=work.batch_size, shuffle=True)
    trained = {"model": model, "optimizer": optimizer}
    for _ in run.epochs(sys.maxsize):
        for batch in train:
            loss = work.loss(model, batch)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if log:
                run.log(loss=loss)
            yield trained


def by_hand(run: paceline.Run, work: Work, *, log: bool = False) -> Iterator[dict[str, Any]]:
    """Train forever with torch alone, in the ranks of a run; yields the model and the optimizer after each step."""
    device = run.device
    model = DistributedDataParallel(work.build().to(device), device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.leave_out(optimizer)
    sampler = DistributedSampler(work.dataset, shuffle=True)
    train = DataLoader(work.dataset, batch_size=work.batch_size // dist.get_world_size(), sampler=sampler)
    trained = {"model": model, "optimizer": optimizer}
    steps = 0
    losses = 0.0
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for batch in train:
            loss = work.loss(model, [part.to(device) for part in batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if log:
                steps += 1
                losses += loss.item()
                if steps % LOG_EVERY == 0:
                    mean = torch.tensor(losses / LOG_EVERY / dist.get_world_size())
                    dist.all_reduce(mean)
                    losses = 0.0
            yield trained
