"""`pipeline_step.py 1f1b|gpipe FILE`: the seconds of a step with the library's pipeline, and with torch's by hand.

By hand the model is cut into one stage per rank, which `torch.distributed.pipelining` trains. Both train in the same
ranks, with the same microbatches, and take turns step by step, A B B A …. Rank 0 writes the times of the window with
the median ratio to FILE.
"""

import sys
from collections.abc import Callable

import torch
from blocks import Blocks, build, make_batch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy
from turns import write_median

import paceline

WIDTH, DEPTH = 256, 12  # 7.6 million parameters, 30 MB
WORDS, MICROBATCHES = 512, 8  # per step, of all ranks
STEPS = 5


def cut(model: Blocks, stage: int, stages: int) -> nn.Module:
    """The layers of a stage."""
    each = DEPTH // stages
    layers: list[nn.Module] = list(model.blocks[stage * each : (stage + 1) * each])
    first = [model.embedding] if stage == 0 else []
    last = [model.norm, model.head] if stage == stages - 1 else []
    return nn.Sequential(*first, *layers, *last)


def by_library(run: paceline.Run, schedule: str) -> Callable[[], None]:
    """Takes a step."""
    model = build(WIDTH, DEPTH)
    optimizer = torch.optim.AdamW(model.parameters())
    strategy = paceline.Strategy(pipeline=run.world_size, microbatches=MICROBATCHES, schedule=schedule)
    model, optimizer = run.setup(model, optimizer, strategy=strategy)
    batch = make_batch(0, WORDS)

    def step() -> None:
        run.pipeline_step(batch, cross_entropy)
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_hand(run: paceline.Run, schedule: str) -> Callable[[], None]:
    """Takes a step."""
    own = cut(build(WIDTH, DEPTH), run.rank, run.world_size)
    optimizer = torch.optim.AdamW(own.parameters())
    run.leave_out(optimizer)
    stage = PipelineStage(own, run.rank, run.world_size, torch.device("cpu"))
    kind = Schedule1F1B if schedule == "1f1b" else ScheduleGPipe
    pipeline = kind(stage, n_microbatches=MICROBATCHES, loss_fn=cross_entropy)
    x, y = make_batch(0, WORDS)

    def step() -> None:
        losses: list[Tensor] = []
        if run.rank == 0:
            pipeline.step(x)
        else:
            pipeline.step(target=y, losses=losses)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main(schedule: str, file: str) -> None:
    with paceline.init(seed=0) as run:
        write_median(run, by_library(run, schedule), by_hand(run, schedule), STEPS, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
