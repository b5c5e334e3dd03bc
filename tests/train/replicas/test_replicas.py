"""Ranks that train with different parameters or numbers end, with a line that says in what they differ, and why."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch
from tests.train.launching import launch

import paceline

if TYPE_CHECKING:
    from pathlib import Path

_STEPS = 24


def _flip(tensor: torch.Tensor, bit: int = 18) -> None:
    tensor.detach().view(-1).view(torch.int32)[2] ^= 1 << bit


def _train(case: str, folder: Path | None = None, strategy: paceline.Strategy | None = None) -> tuple[int, list[str]]:
    """Train a small model, where the last rank does something wrong; returns the steps and what was warned of."""
    warned: list[str] = []
    log, handler = logging.getLogger("paceline"), logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    torch.manual_seed(0)
    inputs = torch.randn(64, 6)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    with paceline.init(checkpoint_dir=folder, checkpoint_every=8 if folder else None, progress=False) as run:
        is_wrong = run.rank == run.world_size - 1
        net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 1))
        best = {name: each * 2 for name, each in net.state_dict().items()}
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        model, optimizer = run.setup(net, optimizer, strategy=strategy)
        if case == "reset" and is_wrong:
            net[1].reset_parameters()
        if case == "load" and run.is_main:
            net.load_state_dict(best)
        loader = run.dataloader(data, global_batch_size=8, shuffle=True)
        for epoch in run.epochs(3):
            for x, y in loader:
                loss = (model(x) - y).square().mean()
                optimizer.zero_grad()
                run.backward(loss)
                optimizer.step()
                if run.step == 13 and is_wrong and case == "parameter":
                    _flip(net[0].weight)
                if run.step == 13 and is_wrong and case == "state":
                    _flip(optimizer.state[net[0].bias]["exp_avg_sq"], bit=0)
            if case == "plateau":
                scheduler.step(10.0 ** -(run.rank * epoch))
        return run.step, warned


def _failure(*args: object, ranks: int = 2) -> str:
    with pytest.raises((paceline.ReplicaMismatch, paceline.RankFailed)) as caught:
        launch(_train, args, ranks)
    return f"{caught.typename}: {caught.value}"


@pytest.mark.parametrize(
    ("case", "ranks", "said"),
    [
        ("reset", 3, "rank 2 differs from the other ranks in the parameter 1.weight and 1 more, seen before step 1"),
        ("load", 2, "ranks 0 and 1 differ in the parameter 0.weight and 3 more, seen before step 1, and never equal"),
        ("plateau", 2, "ranks 0 and 1 differ in lr of Adam"),
        ("parameter", 3, "rank 2 differs from the other ranks in the parameter 0.weight, seen after step"),
    ],
)
def test_what_only_a_comparison_can_find(case: str, ranks: int, said: str) -> None:
    line = _failure(case, ranks=ranks)
    assert "ReplicaMismatch: " in line
    assert said in line
    why = {"plateau": 'give it run.all_reduce(loss, "mean")', "parameter": "as by a fault of the memory"}
    assert why.get(case, "weights were changed on some ranks only after run.setup") in line


def test_what_differs_is_in_no_checkpoint(tmp_path: Path) -> None:
    line = _failure("state", tmp_path)
    assert "in the optimizer state exp_avg_sq of 0.bias" in line
    assert "seen at the checkpoint of step 16, equal after step 8: one value of it alone differs" in line
    assert [each.name for each in tmp_path.glob("step-*")] == ["step-000008"]


@pytest.mark.parametrize("replicas", ["warn", "off"])
def test_a_script_may_go_on_with_different_replicas(tmp_path: Path, replicas: str) -> None:
    ended = launch(_train, ("state", tmp_path, paceline.Strategy(replicas=replicas)), 2)  # type: ignore[arg-type]
    assert [steps for steps, _ in ended] == [_STEPS, _STEPS]
    assert [len(warned) for _, warned in ended] == [replicas == "warn", 0]
    assert len([*tmp_path.glob("step-*")]) == 3


def test_ranks_that_are_equal_or_differ_on_purpose_go_on(tmp_path: Path) -> None:
    for sync in (None, paceline.LocalSGD(every=3, warmup=2), paceline.DiLoCo(every=4, fragments=1, overlap=False)):
        ended = launch(_train, ("", tmp_path / type(sync).__name__, paceline.Strategy(sync=sync)), 2)
        assert ended == [(_STEPS, []), (_STEPS, [])]


def test_replicas_has_three_values() -> None:
    with pytest.raises(ValueError, match="replicas 'no' is none of 'check', 'warn', 'off'"):
        paceline.Strategy(replicas="no")  # type: ignore[arg-type]
