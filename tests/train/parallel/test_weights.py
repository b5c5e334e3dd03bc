"""Losses that are no mean over samples: their gradients are those of one process by hand."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.train.launching import launch, launch_each  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import paceline  # noqa: E402

pytestmark = pytest.mark.torch
SIZE, BATCH = 13, 4  # of the last batch, two of three ranks have none


def build(seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()


def data() -> tuple[Any, Any]:
    """Samples, and how much each counts: a token count, 0 for one that a script leaves out."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SIZE, 3, generator=generator, dtype=torch.float64)
    return x, torch.arange(SIZE) * 7 % 5


def values(model: Any) -> list[float]:
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def by_hand(kind: str, accumulate: int) -> list[float]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    x, tokens = data()
    for first in range(0, SIZE, BATCH * accumulate):
        window = slice(first, first + BATCH * accumulate)
        losses = model(x[window]).pow(2).flatten()
        (losses.sum() if kind == "sum" else (losses * tokens[window]).sum() / tokens[window].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def with_the_library(kind: str, accumulate: int, own_loop: bool) -> list[float]:
    with paceline.init() as run:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(accumulate=accumulate))
        if own_loop:
            batches: Any = [[t[i : i + BATCH] for t in data()] for i in range(0, SIZE - SIZE % BATCH, BATCH)]
            share = slice(run.rank, BATCH, run.world_size)
            batches = [(x[share], tokens[share]) for x, tokens in batches]
        else:
            batches = run.dataloader(TensorDataset(*data()), global_batch_size=BATCH)
        for x, tokens in batches:
            losses = model(x).pow(2).flatten()
            if kind == "sum":
                run.backward(losses.sum(), reduction="sum")
            else:
                count = tokens.sum()
                mean = (losses * tokens).sum() / count.clamp(min=1)
                run.backward(mean, weight=count if kind == "tensor" else int(count))
            optimizer.step()
            optimizer.zero_grad()
        return values(model)


@pytest.mark.parametrize("nproc", [1, 3])
def test_the_weight_of_a_loss(nproc: int) -> None:
    for kind, accumulate in (("number", 1), ("tensor", 2), ("number", 3), ("sum", 1), ("sum", 2)):
        expected = by_hand(kind, accumulate)
        for weights in launch(with_the_library, (kind, accumulate, False), nproc):
            assert weights == pytest.approx(expected, abs=1e-13), (kind, accumulate)


def test_the_weight_of_a_loss_in_a_loop_of_ones_own() -> None:
    (expected,) = launch(with_the_library, ("number", 3, True))
    for weights in launch(with_the_library, ("tensor", 3, True), 2):
        assert weights == pytest.approx(expected, abs=1e-13)


def of_two_loaders(kind: str, sizes: tuple[int, int]) -> list[float] | str:
    """The weights after an epoch in which each step has batches of two loaders; or the error."""
    with paceline.init() as run:
        model = build()
        model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 0.05))
        x = data()[0]
        one, other = (run.dataloader(TensorDataset(x[:size]), global_batch_size=BATCH) for size in sizes)
        evaluated = run.dataloader(TensorDataset(x), global_batch_size=BATCH, evaluation=True)
        pairs: Any = {
            "evaluation": zip(one, evaluated, strict=False),
            "look": ((each, each) for each in one if list(other)),
            "nested": ((each, within) for each in one for within in other),
        }.get(kind, zip(one, other, strict=False))
        try:
            for (a,), (b,) in pairs:
                losses = model(b).pow(2)
                if kind == "weight":
                    run.backward(losses.mean(), weight=other.samples)
                elif kind == "sum":
                    run.backward(model(a).pow(2).sum() + losses.sum(), reduction="sum")
                else:
                    run.backward((losses.mean() if kind != "evaluation" else 0) + model(a).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
        except RuntimeError as error:
            return f"{run.step} {error}"
        return values(model)


def test_the_loss_of_two_loaders() -> None:
    right = [
        ("zip", (12, 12)), ("zip", (9, 9)), ("weight", (9, 12)), ("weight", (12, 9)), ("sum", (11, 12)),
        ("evaluation", (9, 9)), ("look", (12, 9)),
    ]  # fmt: skip
    wrong = [("zip", (9, 12)), ("zip", (12, 9)), ("zip", (11, 12)), ("sum", (9, 12)), ("nested", (8, 5))]
    alone = [each for (each,) in launch_each(of_two_loaders, right)]
    together = launch_each(of_two_loaders, [*right, *wrong], 2)
    for case, expected, ranks in zip(right, alone, together, strict=False):
        assert ranks == [pytest.approx(expected, abs=1e-13)] * 2, case
    for (kind, sizes), ranks in zip(wrong, together[len(right) :], strict=True):
        one, other = (4, 1) if kind == "nested" else (size - 8 for size in sizes)
        expected = f"a step with {one} samples of one training loader and {other} of another cannot be divided alike"
        assert all(expected in str(message) for message in ranks), (kind, sizes)


def test_weights_that_mean_nothing() -> None:
    with paceline.init() as run:
        model = run.setup(build(), strategy=paceline.Strategy(accumulate=2))
        x = data()[0]
        for bad in (-1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=r"weight=.* is not a number of 0 or more"):
                run.backward(model(x).mean(), weight=bad)
        with pytest.raises(ValueError, match=r"reduction='median': it must be"):
            run.backward(model(x).mean(), reduction="median")
        with pytest.raises(ValueError, match=r"only 'mean' takes weight="):
            run.backward(model(x).mean(), 3, reduction="sum")
        run.backward(model(x).mean(), weight=3)
        with pytest.raises(
            RuntimeError, match=r"this loss has no weight=, but an earlier one of this accumulation has weight="
        ):
            run.backward(model(x).mean())


def lbfgs(nproc: int) -> list[float]:
    with paceline.init() as run:
        model = build()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=1, max_iter=8, line_search_fn="strong_wolfe")
        model, optimizer = run.setup(model, optimizer)
        seen = []
        for x, tokens in run.dataloader(TensorDataset(*data()), global_batch_size=7):

            def closure(x: Any = x, tokens: Any = tokens) -> Any:
                optimizer.zero_grad()
                loss = (model(x).flatten() - tokens).pow(2).mean()
                run.backward(loss)
                return loss

            seen.append(float(optimizer.step(closure)))
        return seen + values(model)


def test_a_closure_sees_the_loss_of_all_ranks() -> None:
    """The line search takes other steps for other losses, and so other numbers of them on each rank."""
    (alone,) = launch(lbfgs, (1,))
    for seen in launch(lbfgs, (3,), 3):
        assert seen == pytest.approx(alone, abs=1e-8)


def test_a_closure_with_accumulation_is_refused() -> None:
    with paceline.init() as run:
        model = build()
        optimizer = torch.optim.LBFGS(model.parameters())
        run.setup(model, optimizer, strategy=paceline.Strategy(accumulate=2))
        with pytest.raises(RuntimeError, match=r"use Strategy\(accumulate=1\)"):
            optimizer.step(lambda: torch.zeros(()))


def twice_through(nproc: int) -> list[float]:
    """The losses of a pair of models share a forward pass, and each is for the parameters of one."""
    with paceline.init() as run:
        maker, judge = (torch.nn.Linear(3, 3).double(), build(4))
        for parameter in maker.parameters():
            torch.nn.init.constant_(parameter, 0.5)
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (maker, judge)]
        maker, judge, *optimizers = run.setup(maker, judge, *optimizers)
        for x, _ in run.dataloader(TensorDataset(*data()), global_batch_size=6):
            made = judge(maker(x))
            run.backward(made.pow(2).mean(), retain_graph=True, inputs=list(judge.parameters()))
            run.backward((made - 1).pow(2).mean(), inputs=maker.parameters())
            made = judge(maker(x))
            run.backward(made.pow(2).mean(), retain_graph=True)
            run.backward(made.mean())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with (
            pytest.raises(ValueError, match=r"inputs= has some parameters of a model, but not weight")
            if nproc > 1
            else (pytest.raises(RuntimeError))
        ):
            run.backward(maker(x).sum(), inputs=maker.bias)
            assert nproc == 1
            raise RuntimeError
        return values(maker) + values(judge)


def test_retain_graph_and_inputs() -> None:
    (alone,) = launch(twice_through, (1,))
    for seen in launch(twice_through, (2,), 2):
        assert seen == pytest.approx(alone, abs=1e-12)


# -- losses over the samples of all ranks ------------------------------------------------------------------------------


def contrastive(own: Any, everyone: Any, first: int) -> Any:
    """The mean over some samples of how well each is told from all others; 0 without samples."""
    targets = torch.arange(first, first + len(own))
    losses = torch.nn.functional.cross_entropy(own @ everyone.T * 3, targets, reduction="sum")
    return losses / max(1, len(own))


def pairs() -> Any:
    return torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def encoder() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4)).double()


def contrastive_by_hand() -> list[float]:
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    for x in pairs().split(BATCH):
        found = model(x)
        contrastive(found, model(x * 0.9), 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def contrastive_together() -> list[float]:
    with paceline.init() as run:
        model = encoder()
        model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 0.2))
        train = run.dataloader(TensorDataset(pairs()), global_batch_size=BATCH)
        for (x,) in train:
            found = model(torch.cat([x, x * 0.9]))
            own, other = (half[: train.samples] for half in found.chunk(2))  # 0 of them if the batch is a stand-in
            others = run.all_gather(other, differentiable=True)
            first = sum(map(len, others[: run.rank]))
            run.backward(contrastive(own, torch.cat(others), first))
            optimizer.step()
            optimizer.zero_grad()
        return values(model)


@pytest.mark.parametrize("nproc", [1, 3])
def test_gradients_flow_through_what_is_gathered(nproc: int) -> None:
    expected = contrastive_by_hand()
    for weights in launch(contrastive_together, (), nproc):
        assert weights == pytest.approx(expected, abs=1e-13)
