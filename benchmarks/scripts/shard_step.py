"""`shard_step.py fsdp|ddp FILE`: the seconds of a step with the library's sharded model, and with one by hand.

By hand it is FSDP2 with the backend's own collectives, or `DistributedDataParallel`. Both train in the same ranks and
take turns step by step, A B B A …. Rank 0 writes the times of the window with the median ratio to FILE.
"""

import sys
from collections.abc import Callable

import torch
from blocks import build, make_batch, shard_by_hand
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from turns import write_median

import paceline

WIDTH, DEPTH = 256, 12  # 7.6 million parameters, 30 MB
WORDS = 128  # per rank and step
STEPS = 5


def trainer(run: paceline.Run, what: str) -> Callable[[], None]:
    """Takes a step."""
    whole = build(WIDTH, DEPTH).to(run.device)
    model: torch.nn.Module = whole
    x, y = (part.to(run.device) for part in make_batch(run.rank, WORDS))
    if what == "paceline":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(shard=True))
        backward = run.backward
    else:
        model = shard_by_hand(whole) if what == "fsdp" else DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters())
        run.leave_out(optimizer)
        backward = torch.Tensor.backward

    def step() -> None:
        backward(cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

    return step


def main(what: str, file: str) -> None:
    with paceline.init(seed=0) as run:
        ours, other = trainer(run, "paceline"), trainer(run, what)
        write_median(run, ours, other, STEPS, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
