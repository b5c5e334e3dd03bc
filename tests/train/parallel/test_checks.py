"""What would make the ranks train with different weights, or wait for ever, is an error that names rank and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import paceline  # noqa: E402

pytestmark = pytest.mark.torch


def line(text: str) -> str:
    """The place of a line in this file, as errors name it."""
    lines = Path(__file__).read_text().splitlines()
    return f"test_checks.py:{next(number for number, found in enumerate(lines, 1) if text in found)}"


def message(fn: Any, *args: Any) -> str:
    """What the first failing one of two ranks raises."""
    with pytest.raises(RuntimeError) as caught:
        launch(fn, args, 2)
    return f"{type(caught.value).__name__}: {caught.value}"


def training(strategy: Any = None) -> tuple[Any, Any, Any, Any]:
    run = paceline.init(timeout=60)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = run.setup(model, optimizer, strategy=strategy)
    train = run.dataloader(
        TensorDataset(torch.randn(400, 3, generator=torch.Generator().manual_seed(1))), global_batch_size=4
    )
    return run, model, optimizer, train


def skips(step: int) -> None:
    run, model, optimizer, train = training()
    for (x,) in train:
        run.backward(model(x).pow(2).mean())  # before the step
        if run.rank == 0 or run.step != step - 1:
            optimizer.step()  # on some ranks
        optimizer.zero_grad()
    run.close()


@pytest.mark.parametrize("step", [1, 30, 100])
def test_a_step_of_the_optimizer_that_a_rank_leaves_out(step: int) -> None:
    """In the first steps, in the middle, and in the epoch's last one."""
    assert message(skips, step).startswith(
        f"OptimizerMismatch: after the backward of step {step} ({line('# before the step')}) rank 1 did not call "
        f"SGD.step(), and rank 0 called it ({line('# on some ranks')})"
    )


def sound() -> int:
    """Optimizers that step now and then, and not all of them."""
    run, model, optimizer, train = training()
    second = run.setup(torch.optim.Adam(model.parameters()))
    with run:
        for _ in run.epochs(2):
            for number, (x,) in enumerate(train):
                run.backward(model(x).pow(2).mean())
                if number % 3:
                    optimizer.step()
                if number % 2:
                    second.step()
                second.zero_grad()
        return run.step


def test_ranks_that_step_alike_are_no_mismatch() -> None:
    assert launch(sound, nproc=2) == [200, 200]


def changes(how: str) -> None:
    run, model, optimizer, train = training(paceline.Strategy(accumulate=3))
    for (x,) in train:
        run.backward(model(x).pow(2).mean())  # accumulates
        if how == "clip" and run.rank == 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        if how == "zero" and run.rank == 1:
            model.zero_grad()
        run.clip_grad_norm(0.1)  # fine
        optimizer.step()
        optimizer.zero_grad()
        if how == "nothing" and run.step == 7:
            return run.close()


@pytest.mark.parametrize("how", ["clip", "zero"])
def test_gradients_that_are_changed_before_the_accumulation_is_over(how: str) -> None:
    why, place = message(changes, how), line("# accumulates")
    assert why.startswith(
        f"AccumulationChanged: rank 1 has changed gradients between run.backward at {place} and run.backward at {place}"
    )
    assert "use run.clip_grad_norm" in why


def independent(unused: bool) -> None:
    run, model, optimizer, train = training(paceline.Strategy(find_unused_parameters=unused))
    for (x,) in train:
        loss = model(x).pow(2).mean()
        if run.rank == 1 and run.step == 3:
            loss = torch.ones((), requires_grad=True) * 2
        run.backward(loss)  # that depends on nothing
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("unused", [True, False])
def test_a_loss_that_depends_on_no_model(unused: bool) -> None:
    why = message(independent, unused)
    assert why.startswith(
        f"UnusedParameters: the loss of rank 1 at {line('# that depends on nothing')} depends on no model"
    )
