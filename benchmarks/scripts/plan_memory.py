"""`plan_memory.py ARCHITECTURE FILE`: the peak memory of training it with AdamW, of the rank with the most.

Rank 0 writes the megabytes to FILE. See `shard_memory.py` for what is measured, and how.
"""

import json
import sys
from pathlib import Path

import torch
from architectures import ARCHITECTURES, Architecture
from shard_memory import begin_peak, kilobytes, start
from torch.nn.functional import cross_entropy

import paceline

SAMPLES, STEPS = 8, 3  # per rank and step
PLANNED = "-"  # in place of FILE: only the model itself is made, for `paceline plan`
SMALL = {"width": 64, "depth": 2}


def train(run: paceline.Run, kind: Architecture, options: dict[str, int], before: int = 0) -> float:
    """Train; returns megabytes of the peak in the last step."""
    numbers = torch.Generator().manual_seed(run.rank)
    x = torch.stack([kind.sample(numbers) for _ in range(SAMPLES)])
    y = torch.randint(kind.classes, (SAMPLES,), generator=numbers)
    with run.build():
        model = kind.build(**options)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(shard=run.world_size > 1))
    for number in range(STEPS):
        if number == STEPS - 1:
            begin_peak()
        run.backward(
            cross_entropy(model(x[..., : options.get("width")] if x.is_floating_point() and x.dim() == 2 else x), y)
        )
        optimizer.step()
        optimizer.zero_grad()
    return (kilobytes("VmHWM") - before) * 1024 / 1e6


def main(name: str, file: str) -> None:
    kind = ARCHITECTURES[name]
    with paceline.init(seed=0) as run:
        if file != PLANNED:
            train(run, kind, SMALL)  # libraries are loaded, and make what they keep
        most = run.all_reduce(train(run, kind, {}, before=start()), "max")
        if run.is_main:
            Path(file).write_text(json.dumps(most))


if __name__ == "__main__":
    main(*sys.argv[1:])
