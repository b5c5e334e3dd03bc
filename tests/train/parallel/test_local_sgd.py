"""LocalSGD: ranks train alone for some steps, and then average."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402
from tests.train.parallel.test_methods import batch, loss_of  # noqa: E402

import paceline  # noqa: E402
from paceline import LocalSGD  # noqa: E402
from paceline.train.parallel.sync.methods.local_sgd import Pace  # noqa: E402

pytestmark = pytest.mark.torch


def build() -> Any:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 40), torch.nn.BatchNorm1d(40), torch.nn.Tanh(), torch.nn.Linear(40, 3)
    )


def values(model: Any) -> list[float]:
    return [value for each in model.state_dict().values() for value in each.double().flatten().tolist()]


def optimizer_of(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


@given(
    losses=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6),
    rates=st.lists(st.floats(1e-6, 1.0), min_size=6, max_size=6),
    initial=st.integers(1, 16),
)
def test_auto_follows_the_rule_of_paddle(losses: list[float], rates: list[float], initial: int) -> None:
    auto = Pace(LocalSGD(every="auto", initial=initial))
    assert auto.every == initial
    for loss, rate in zip(losses, rates, strict=False):
        auto.adapt(loss, rate)
        ratio = rates[0] * loss / (rate * losses[0])
        rule = math.sqrt(ratio * initial)
        assert 1 <= auto.every <= 16
        assert auto.every in (math.ceil(rule), round(rule) + 1, round(rule)) or not 1 <= rule <= 16


def adaptive() -> tuple[list[float], list[int]]:
    found, apart = [], []
    with paceline.init() as run:
        model = build()
        sync = LocalSGD(every="auto", warmup=2, initial=9)
        model, optimizer = run.setup(model, optimizer_of(model), strategy=paceline.Strategy(sync=sync))
        for step in range(40):
            for group in optimizer.param_groups:
                group["lr"] = 0.05 if step < 20 else 0.005
            optimizer.zero_grad()
            run.backward(loss_of(model, batch(run.rank, step)))
            optimizer.step()
            mine = torch.tensor([p for p in values(model)])
            if all(torch.equal(mine, each) for each in run.all_gather(mine)):
                apart.append(step)
            found = values(model)
    return found, apart


def test_auto_averages_less_often_with_a_smaller_learning_rate() -> None:
    (_, steps), (_, others) = launch(adaptive, (), 2)
    assert steps == others
    assert steps[0] == 10  # 2 steps that average gradients, and 9 alone
    gaps = {later: later - earlier for earlier, later in itertools.pairwise(steps)}
    assert 1 <= min(gaps.values()) <= max(gaps.values()) <= 16
    assert max(gap for step, gap in gaps.items() if step > 25) > max(
        gap for step, gap in gaps.items() if 10 < step < 20
    )


class Quantised(torch.nn.Module):
    """It has a table of integers, and complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.arange(6, dtype=torch.int8), requires_grad=False)
        self.phase = torch.nn.Parameter(torch.ones(6, dtype=torch.complex64))
        self.last = torch.nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        return self.last((x * self.table * self.phase).abs())


def quantised(sync: Any) -> None:
    with paceline.init() as run:
        torch.manual_seed(1)
        model = Quantised()
        model, optimizer = run.setup(
            model, torch.optim.SGD(model.parameters(), 1e-3), strategy=paceline.Strategy(sync=sync)
        )
        own: list[Any] = []
        step = optimizer.register_step_post_hook(lambda *_: own.append(model.phase.detach().clone()))
        for number in range(2):
            optimizer.zero_grad()
            run.backward(loss_of(model, batch(run.rank, number)))
            if number == 1:
                step.remove()
            optimizer.step()
        first, second = run.all_gather(own[0])
        assert not torch.equal(first, second)  # each rank has trained alone
        assert torch.equal(*run.all_gather(model.phase))
        assert model.table.tolist() == list(range(6))


@pytest.mark.parametrize(
    "sync", [LocalSGD(every=2, warmup=0), paceline.DiLoCo(every=2, fragments=1, overlap=False, wire="fp32")]
)
def test_tables_of_integers_stay_and_complex_weights_are_averaged(sync: Any) -> None:
    launch(quantised, (sync,), 2)


def without_optimizer() -> None:
    with paceline.init() as run:
        model = run.setup(build(), strategy=paceline.Strategy(sync="local_sgd"))
        run.backward(loss_of(model, batch(run.rank, 0)))


def with_closure() -> None:
    with paceline.init() as run:
        model = build()
        optimizer = torch.optim.LBFGS(model.parameters())
        model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(sync=LocalSGD(warmup=0)))

        def closure() -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, batch(run.rank, 0))
            run.backward(loss)
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize(
    ("script", "message"),
    [(without_optimizer, r"LocalSGD\(\) must know the optimizer"), (with_closure, "use an optimizer without")],
)
def test_what_local_sgd_cannot_do(script: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        launch(script, (), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0 is neither"),
        ({"warmup": -1}, "warmup=-1"),
        ({"momentum": "none"}, "momentum='none'"),
        ({"hierarchical": "auto"}, "hierarchical='auto' is neither True, False, 'measured' nor a list of groups"),
    ],
)
def test_bad_options(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalSGD(**options)
