"""`horovod_ops.py step|small|one|idle FILE`: Horovod's API beside torch.distributed, in turns in the same ranks.

step: seconds of a training step with DistributedOptimizer, and with DistributedDataParallel: 21 MB of gradients.
small: seconds of 1,000 named allreduces of 10 numbers each, and of gloo's allreduce one by one.
one: seconds of CPU time of a rank for 100 times `hvd.allreduce` of one number, and gloo's.
idle: seconds of CPU time of the thread of the API in some seconds in which nothing is done, and those seconds.

Rank 0 writes the pair with the median ratio to FILE.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paceline.horovod.torch as hvd

Step = Callable[[], object]


def model() -> torch.nn.Module:
    """5.25 M parameters: 21 MB of gradients."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512) for _ in range(20)]
    return torch.nn.Sequential(*(module for layer in layers for module in (layer, torch.nn.ReLU())))


def training(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    data = torch.randn(128, 512)

    def step() -> None:
        optimizer.zero_grad()
        net(data).square().mean().backward()
        optimizer.step()

    return step


def steps() -> tuple[Step, Step]:
    ours, other = model(), model()
    plain = torch.optim.SGD(ours.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=ours.named_parameters())
    ddp = DistributedDataParallel(other)
    return training(ours, optimizer), training(ddp, torch.optim.SGD(ddp.parameters(), lr=1e-3))


def small() -> tuple[Step, Step]:
    tensors = [torch.ones(10) for _ in range(1000)]
    names = [f"small.{index}" for index in range(1000)]

    def ours() -> None:
        handles = [
            hvd.allreduce_async_(tensor, name=name, op=hvd.Sum) for tensor, name in zip(tensors, names, strict=True)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    def other() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    return ours, other


def one() -> tuple[Step, Step]:
    number = torch.ones(1)

    def ours() -> None:
        for _ in range(100):
            hvd.allreduce(number, name="one")

    def other() -> None:
        number.fill_(1.0)
        for _ in range(100):
            dist.all_reduce(number)

    return ours, other


def seconds(step: Step, clock: Callable[[], float]) -> float:
    """Of a step that all ranks begin together."""
    dist.barrier()
    began = clock()
    step()
    return clock() - began


def in_turns(ours: Step, other: Step, count: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of each step, in turns A B B A …: the median of windows of four, each the mean of the ranks."""
    for _ in range(5):
        seconds(ours, clock)
        seconds(other, clock)
    windows = []
    for _ in range(count):
        sums = torch.zeros(2, dtype=torch.float64)
        for side in (0, 1, 1, 0):
            sums[side] += seconds((ours, other)[side], clock) / 2
        dist.all_reduce(sums)
        windows.append((sums[0].item() / hvd.size(), sums[1].item() / hvd.size()))
    windows.sort(key=lambda pair: pair[0] / pair[1])
    return windows[len(windows) // 2]


def idle() -> tuple[float, float]:
    """CPU time of the thread while it waits, and the time."""
    for index in range(20):
        hvd.allreduce(torch.ones(10), name=f"before.{index}")
    wall = 5.0
    (thread,) = (one for one in threading.enumerate() if one.name == "paceline-horovod")
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    before = time.clock_gettime(clock)
    time.sleep(wall)
    return time.clock_gettime(clock) - before, wall


def main(what: str, file: str) -> None:
    hvd.init()
    if what != "idle":
        dist.init_process_group("gloo")
    clock = time.process_time if what == "one" else time.perf_counter
    sides = {"step": steps, "small": small, "one": one}
    measured = idle() if what == "idle" else in_turns(*sides[what](), count=15, clock=clock)
    if hvd.rank() == 0:
        Path(file).write_text(json.dumps(measured))
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
