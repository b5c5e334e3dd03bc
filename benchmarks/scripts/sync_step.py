"""`sync_step.py OURS OTHER FILE`: the seconds of a step with 21 MB of gradients, with two ways to exchange them.

OURS is a method of `Strategy(sync=…)`. OTHER is `ddp` for hand-written DDP, or `powersgd-hook` for that with torch's
hook. Both train in the same ranks and take turns. Rank 0 writes the times of the window with the median ratio to FILE.
"""

import dataclasses
import sys
from collections.abc import Callable

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from turns import write_median

import paceline
from paceline.train.parallel.sync.options import LocalSGD, PowerSGD, Sync, parse

STEPS = 8  # `local_sgd(8)` averages once in a window
RANK = 2


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(20)))


def method(name: str) -> Sync:
    """The method of this name, without steps at the start in which it does as `allreduce`."""
    found = parse(name)
    return dataclasses.replace(found, warmup=0) if isinstance(found, (PowerSGD, LocalSGD)) else found


def trainer(run: paceline.Run, what: str) -> Callable[[], None]:
    """Takes a step."""
    model, x = build(), torch.randn(64, 512)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if what in ("ddp", "powersgd-hook"):
        # On gloo the hook fails with more than one bucket: its callbacks begin exchanges in another order on each rank.
        bucket = 25 if what == "powersgd-hook" else None
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket)
        if what == "powersgd-hook":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        backward = torch.Tensor.backward
    else:
        wrapped, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(sync=method(what)))
        backward = run.backward

    def step() -> None:
        optimizer.zero_grad()
        backward(wrapped(x).square().mean())
        optimizer.step()

    return step


def main(one: str, another: str, file: str) -> None:
    with paceline.init(seed=0) as run:
        ours, other = trainer(run, one), trainer(run, another)
        write_median(run, ours, other, STEPS, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
