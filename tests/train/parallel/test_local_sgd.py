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
from torch.utils.data import TensorDataset  # noqa: E402

import paceline  # noqa: E402
from paceline import LocalSGD  # noqa: E402
from paceline.train.parallel.sync.methods.local_sgd import Pace  # noqa: E402

pytestmark = pytest.mark.torch


def build() -> Any:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 40), torch.nn.BatchNorm1d(40), torch.nn.Tanh(), torch.nn.Linear(40, 3)
    )


def batch(rank: int, step: int) -> Any:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(model: Any, x: Any) -> Any:
    return (model(x) - x[:, :3].sin()).square().mean()


def values(model: Any) -> list[float]:
    return [value for each in model.state_dict().values() for value in each.double().flatten().tolist()]


def optimizer_of(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def alone(sync: Any, steps: int) -> list[list[float]]:
    """What each rank has after every step."""
    with paceline.init() as run:
        model = build()
        model, optimizer = run.setup(model, optimizer_of(model), strategy=paceline.Strategy(sync=sync))
        found = []
        for step in range(steps):
            optimizer.zero_grad()
            run.backward(loss_of(model, batch(run.rank, step)))
            optimizer.step()
            found.append(values(model))
        return found


def by_hand(ranks: int, steps: int, every: int, *, average_momentum: bool, groups: Any = ()) -> list[list[list[float]]]:
    models = [build() for _ in range(ranks)]
    optimizers = [optimizer_of(model) for model in models]
    found: list[list[list[float]]] = [[] for _ in models]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()
        for group in groups:
            for same in zip(*(models[rank].parameters() for rank in group), strict=True):
                average = torch.stack([each.grad for each in same]).mean(0)
                for each in same:
                    each.grad = average.clone()
        for optimizer in optimizers:
            optimizer.step()
        if (step + 1) % every == 0:
            states = [model.state_dict() for model in models]
            mean = {
                name: torch.stack([state[name] for state in states]).mean(0) if each.is_floating_point() else each
                for name, each in states[0].items()
            }
            for model in models:
                model.load_state_dict(mean)
            if average_momentum:
                for parts in zip(*(optimizer.state.values() for optimizer in optimizers), strict=True):
                    buffers = [part["momentum_buffer"] for part in parts]
                    average = torch.stack(buffers).mean(0)
                    for each in buffers:
                        each.copy_(average)
        for rank, model in enumerate(models):
            found[rank].append(values(model))
    return found


@pytest.mark.parametrize("momentum", ["keep", "average"])
def test_ranks_train_alone_and_average(momentum: Any) -> None:
    expected = by_hand(3, 9, 4, average_momentum=momentum == "average")
    results = launch(alone, (LocalSGD(every=4, warmup=0, momentum=momentum), 9), 3)
    for mine, theirs in zip(results, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
    assert results[0][3] == results[1][3] == results[2][3]
    assert results[0][4] != results[1][4]


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 2, 3], [1]], True])
def test_the_ranks_of_a_machine_average_gradients_in_every_step(groups: Any) -> None:
    expected = by_hand(4, 6, 4, average_momentum=False, groups=[[0, 1, 2, 3]] if groups is True else groups)
    results = launch(alone, (LocalSGD(every=4, warmup=0, hierarchical=groups), 6), 4)
    for mine, theirs in zip(results, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


def test_the_first_steps_average_gradients() -> None:
    for mine, other in launch(both, (), 2):
        assert mine[:5] == other[:5]
        assert mine[5] != other[5]


def both() -> tuple[list[list[float]], list[list[float]]]:
    return alone(LocalSGD(every=3, warmup=5), 7), alone("allreduce", 7)


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


def data() -> Any:
    return TensorDataset(torch.randn(70, 6, generator=torch.Generator().manual_seed(2)))


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
