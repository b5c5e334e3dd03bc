"""Ranks that train with different parameters, or numbers of their optimizers, say so."""

from __future__ import annotations

import contextlib
import logging

import pytest

import paceline
from tests.late import hvd, torch
from tests.train.launching import launch

from .ranks import started


def train(how: str, steps: int) -> None:
    rank, size = started(HOROVOD_REPLICAS=how if how in ("off", "warn") else "")
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    options = {"process_set": hvd.add_process_set(range(size - 1))} if how == "a process set" else {}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), **options
    )
    if how in ("broadcast", "a rate", "a late rate", "joined"):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if how == "a rate" and rank == size - 1:
        optimizer.param_groups[0]["lr"] = 0.2
    for step in range(steps + (how == "joined" and rank == 0)):
        if how == "a late rate" and step == steps - 1 and rank == size - 1:
            optimizer.param_groups[0]["lr"] = 0.2
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        if how == "broadcast late" and step == 0:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if how == "joined":
        hvd.join()


def said(how: str, steps: int) -> str:
    """What `train` ends with, or warns of."""
    lines: list[str] = []
    logging.getLogger("paceline").addFilter(lambda record: lines.append(record.getMessage()) is None)
    try:
        train(how, steps)
        hvd.shutdown()
    except paceline.ReplicaMismatch as error:
        lines.append(str(error))
        with contextlib.suppress(paceline.ReplicaMismatch):
            hvd.shutdown()  # ends the others, too
    return "".join(lines)


@pytest.mark.parametrize(
    ("how", "ranks", "steps", "line"),
    [
        ("nothing", 2, 1, "ranks 0 and 1 differ in the parameter 0.weight and 3 more, seen before step 1, and never "
         "equal before: variables were not broadcast before the training; call hvd.broadcast_parameters"),
        ("nothing", 2, 9, "ranks 0 and 1 differ in the parameter 0.weight and 3 more, seen before step 1, "),
        ("a rate", 3, 9, "rank 2 differs from the other ranks in lr of SGD (0.1 on rank 0, 0.2 on rank 2), seen before "
         "step 1, and never equal before: a learning rate was set on some ranks only"),
        ("a late rate", 2, 7, "differ in lr of SGD and 4 more (0.1 on rank 0, 0.2 on rank 1), seen after step 7, "),
    ],
)  # fmt: skip
def test_differences_are_named_on_all_ranks(how: str, ranks: int, steps: int, line: str) -> None:
    lines = launch(said, (how, steps), nproc=ranks)
    assert all(line in each for each in lines), lines


@pytest.mark.parametrize("how", ["broadcast", "broadcast late", "joined", "a process set", "off"])
def test_nothing_is_said_where_ranks_are_equal_or_may_differ(how: str) -> None:
    assert launch(said, (how, 5), nproc=2) == ["", ""]


def test_rank_0_warns_once_if_that_is_asked_for() -> None:
    line, *others = launch(said, ("warn", 7), nproc=2)
    assert line.count("ranks 0 and 1 differ in the parameter 0.weight and 3 more, seen before step 1, ") == 1
    assert others == [""]


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_REPLICAS", "no")
    with pytest.raises(ValueError, match="HOROVOD_REPLICAS=no is none of check, warn and off"):
        hvd.init()
