"""`shard_memory.py paceline|pipeline|fsdp|whole FILE`: the peak memory of training 389 MB with AdamW, and its time.

By hand it is FSDP2, in ranks of `torchrun`, or one process with the whole model. Rank 0 writes to FILE the seconds of a
step and megabytes of the rank with the most: the peak in the steps, and the peak with the making of the model.

It is the peak of the resident memory, shared memory included (VmHWM), beyond what the process had when torch was
imported and the process group was there, before the model was made. The peak begins anew at these two moments, and
after the two first steps, in which AdamW makes its state; writing 5 to /proc/self/clear_refs does so. What was freed
is given back to the system first on both sides (`malloc_trim`), as otherwise the peak in the steps depends on which
holes the whole model has left.
"""

import contextlib
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from blocks import Blocks, build, make_batch, shard_by_hand
from torch import Tensor
from torch.nn.functional import cross_entropy

import paceline

WIDTH, DEPTH = 768, 18  # 97 million parameters, 389 MB; a block has 21 MB
WORDS = 16  # per rank and step: few, so that the memory is that of parameters, gradients and optimizer
FIRST, STEPS = 2, 2


def kilobytes(name: str) -> int:
    """A number of this process's memory."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{name}:"))


def begin_peak() -> None:
    """Let the peak be what the process has now."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def train(
    model: Blocks,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[Tensor], None],
    rank: int,
    pipeline_step: Callable[..., Tensor] | None = None,
) -> list[float]:
    """Returns the seconds of a step, and the two peaks in MB, that in the steps first."""
    x, y = make_batch(rank, WORDS)

    def step() -> None:
        if pipeline_step is not None:
            pipeline_step((x, y), cross_entropy)
        else:
            backward(cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(FIRST):
        step()
    whole = kilobytes("VmHWM")
    begin_peak()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    seconds = (time.perf_counter() - began) / STEPS
    steady = kilobytes("VmHWM")
    return [seconds, steady, max(whole, steady)]


def start() -> int:
    """Kilobytes of the process before it makes the model."""
    begin_peak()
    return kilobytes("VmRSS")


def with_library(pipeline: bool = False) -> list[float]:
    with paceline.init(seed=0) as run:
        before = start()
        with run.build() if pipeline else contextlib.nullcontext():
            model = build(WIDTH, DEPTH)
        optimizer = torch.optim.AdamW(model.parameters())
        strategy = paceline.Strategy(pipeline=run.world_size) if pipeline else paceline.Strategy(shard=True)
        model, optimizer = run.setup(model, optimizer, strategy=strategy)
        rank, step = (0, run.pipeline_step) if pipeline else (run.rank, None)
        seconds, *peaks = train(model, optimizer, run.backward, rank, step)
        return [run.all_reduce(seconds, "max"), *(run.all_reduce(each - before, "max") for each in peaks)]


def with_fsdp() -> list[float]:
    dist.init_process_group("gloo")
    before = start()
    model = shard_by_hand(build(WIDTH, DEPTH))
    seconds, *peaks = train(model, torch.optim.AdamW(model.parameters()), Tensor.backward, dist.get_rank())
    most = torch.tensor([seconds, *(each - before for each in peaks)])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    found: list[float] = most.tolist()
    dist.destroy_process_group()
    return found


def alone() -> list[float]:
    before = start()
    model = build(WIDTH, DEPTH)
    seconds, *peaks = train(model, torch.optim.AdamW(model.parameters()), Tensor.backward, 0)
    return [seconds, *(each - before for each in peaks)]


def main(what: str, file: str) -> None:
    seconds, *peaks = {
        "paceline": with_library,
        "pipeline": lambda: with_library(True),
        "fsdp": with_fsdp,
        "whole": alone,
    }[what]()
    if os.environ.get("RANK", "0") == "0":
        Path(file).write_text(json.dumps([seconds, *(each * 1024 / 1e6 for each in peaks)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
