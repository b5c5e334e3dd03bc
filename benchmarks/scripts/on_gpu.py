"""`on_gpu.py`: what the library costs one rank on a GPU, beside torch alone, in turns; prints lines of a table.

Rows: a step; the stall of a checkpoint of AdamW's state beside `torch.save`; one comparison of replicas beside a step.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import paceline
from paceline.train.replicas.contents import of_optimizer


def build(size: int, depth: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(size, size), nn.ReLU())]
    model = nn.Sequential(*layers).cuda()
    return model, torch.optim.AdamW(model.parameters(), 1e-4)


def seconds(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def show(name: str, pairs: list[tuple[float, float]]) -> None:
    ours, others = (1000 * statistics.median(side) for side in zip(*pairs, strict=True))
    ratios = sorted(a / b for a, b in pairs)
    spread = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})"
    print(f"| {name} | {ours:.2f} ms | {others:.2f} ms | {spread} | {len(pairs)} |", flush=True)


def in_turns(ours: Callable[[], float], others: Callable[[], float], count: int) -> list[tuple[float, float]]:
    pairs = []
    for number in range(count):
        if number % 2:
            pairs.append((ours(), others()))
        else:
            late = others()
            pairs.append((ours(), late))
    return pairs


def step(size: int, depth: int, batch: int, steps: int, count: int) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(batch * steps, size))
    with paceline.init(seed=0, progress=False) as run:
        model, optimizer = run.setup(*build(size, depth))
        loader = run.dataloader(data, batch_size=batch, shuffle=True)
        plain_model, plain_optimizer = build(size, depth)
        plain_loader = torch.utils.data.DataLoader(data, batch_size=batch, shuffle=True, pin_memory=True)

        def with_library() -> Iterator[None]:
            for _ in run.epochs(count + 1):
                for (x,) in loader:
                    run.backward(model(x).pow(2).mean())
                    optimizer.step()
                    optimizer.zero_grad()
                yield

        def by_hand() -> None:
            for (x,) in plain_loader:
                plain_model(x.cuda(non_blocking=True)).pow(2).mean().backward()
                plain_optimizer.step()
                plain_optimizer.zero_grad()

        training = with_library()
        sides = (lambda: seconds(lambda: next(training)) / steps), (lambda: seconds(by_hand) / steps)
        for side in sides:
            side()
        show(f"a step, {depth} layers of {size}, {batch} samples; torch alone", in_turns(*sides, count))


def stall(megabytes: int, count: int) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        paceline.init(seed=0, progress=False, checkpoint_dir=f"{folder}/checkpoints") as run,
    ):
        size = int((megabytes * 1e6 / 4 / 3 / 4) ** 0.5)
        model, optimizer = run.setup(*build(size, 4))

        def train() -> None:
            run.backward(model(torch.randn(64, size, device=run.device)).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()

        def ours() -> float:
            train()
            taken = seconds(run.save)
            run.save(block=True)  # the one before is written
            return taken

        def others() -> float:
            train()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            return seconds(lambda: torch.save(state, f"{folder}/plain.pt"))

        ours()
        show(f"stall of a checkpoint, {megabytes} MB; torch.save", in_turns(ours, others, count))


def compare(size: int, depth: int, count: int) -> None:
    model, optimizer = build(size, depth)
    x = torch.randn(256, size, device="cuda")

    def train() -> None:
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        train()
        of_optimizer(optimizer, 1, alike=True).digest  # noqa: B018 - it waits for the sums
    pairs = in_turns(
        lambda: seconds(lambda: of_optimizer(optimizer, 1, alike=True).digest), lambda: seconds(train), count
    )
    megabytes = sum(parameter.nbytes for parameter in model.parameters()) / 1e6
    show(f"one comparison, {megabytes:.1f} MB in {2 * depth} tensors; a step", pairs)


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| work; against | paceline | against | ratio (min-max) | pairs |\n|---|---|---|---|---|")
    step(64, 3, 64, 100, 15)
    step(1024, 8, 256, 50, 15)
    step(8192, 6, 2048, 8, 7)
    for megabytes in (2, 200, 1500):
        stall(megabytes, 5)
    compare(64, 6, 15)
    compare(512, 10, 15)
    compare(1024, 25, 15)
    compare(4096, 16, 15)
    compare(10, 1000, 5)
