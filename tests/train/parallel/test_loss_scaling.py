"""Mixed precision: the usual loop with torch's GradScaler gives the weights of one large batch."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import paceline  # noqa: E402
from paceline import DiLoCo, LocalSGD, Strategy  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.torch
SIZE, BATCH, EPOCHS, SCALE = 26, 4, 2, 1024.0
CLIP = 0.2  # below the norm of every step


def build() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def data(overflows: Sequence[int] = ()) -> Any:
    """Samples; the loss of those in `overflows` is infinite."""
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(SIZE, 3, generator=generator), torch.randn(SIZE, 1, generator=generator)
    y[list(overflows)] = torch.inf
    return TensorDataset(x, y)


def make(kind: str, model: Any) -> Any:
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), 0.02, fused=True)  # it unscales the gradients itself
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def scaler_of() -> Any:
    """A scaler that grows after every second step."""
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)


def values(model: Any) -> list[float]:
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def by_hand(accumulate: int, kind: str, overflows: Sequence[int] = (), dtype: Any = None) -> tuple[list[float], float]:
    """One process with plain torch, whose batches are those of a whole step."""
    model, scaler = build(), scaler_of()
    optimizer = make(kind, model)
    x, y = data(overflows).tensors
    for _ in range(EPOCHS):
        for first in range(0, SIZE, BATCH * accumulate):
            window = slice(first, first + BATCH * accumulate)
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = (model(x[window]).float() - y[window]).pow(2).mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return values(model), scaler.get_scale()


def usual_loop(
    accumulate: int, kind: str, overflows: Sequence[int] = (), dtype: Any = None
) -> tuple[list[float], float, int]:
    with paceline.init() as run:
        model, scaler = build(), scaler_of()
        model, optimizer = run.setup(model, make(kind, model), strategy=Strategy(accumulate=accumulate))
        loader = run.dataloader(data(overflows), global_batch_size=BATCH)
        for _ in run.epochs(EPOCHS):
            for x, y in loader:
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    loss = (model(x).float() - y).pow(2).mean()
                run.backward(scaler.scale(loss))
                scaler.unscale_(optimizer)
                run.clip_grad_norm(CLIP)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return values(model), scaler.get_scale(), run.step


@pytest.mark.parametrize(  # sample 9 is in the last batch of an accumulation, on one rank
    ("nproc", "accumulate", "kind", "overflows"),
    [(1, 1, "sgd", ()), (1, 3, "adam", (9,)), (2, 3, "sgd", (9,)), (2, 3, "adam", ()), (2, 1, "adam", (9,))],
)
def test_the_usual_loop_gives_the_weights_of_large_batches(
    nproc: int, accumulate: int, kind: str, overflows: Sequence[int]
) -> None:
    """With an epoch whose last accumulation is shorter, and whose last batch is smaller."""
    expected, scale = by_hand(accumulate, kind, overflows)
    assert all(value == value for value in expected)
    for found, own_scale, steps in launch(usual_loop, (accumulate, kind, overflows), nproc):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert (own_scale, steps) == (scale, EPOCHS * -(-SIZE // BATCH))


@pytest.mark.parametrize("first", [0, 5])
def test_an_overflow_in_an_earlier_batch_skips_the_step_once(first: int) -> None:
    """The scale is halved once, and not in the middle of the accumulation."""
    expected, scale = by_hand(3, "sgd", (first,))
    (found, own_scale, _), *_ = launch(usual_loop, (3, "sgd", (first,)), 2)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert own_scale == scale


def narrow(_: None) -> float:
    torch.set_default_dtype(torch.bfloat16)
    with paceline.init(progress=False) as run:
        model, scaler = build().float(), scaler_of()
        model, optimizer = run.setup(model, make("adam", model), strategy=Strategy(shard=True))
        for x, y in run.dataloader(data(), global_batch_size=BATCH):
            run.backward(scaler.scale((model(x.float()) - y.float()).pow(2).mean()))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return float(scaler.get_scale())


def test_a_sharded_model_is_scaled_whatever_the_default_type() -> None:
    assert launch(narrow, (None,), 2) == [8 * SCALE] * 2


@pytest.mark.parametrize("nproc", [1, 2])
def test_the_usual_loop_under_autocast(nproc: int) -> None:
    expected, scale = by_hand(2, "sgd", dtype=torch.bfloat16)
    for found, own_scale, _ in launch(usual_loop, (2, "sgd", (), torch.bfloat16), nproc):
        assert found == pytest.approx(expected, rel=0.05, abs=0.01)
        assert own_scale == scale


def test_scaler_step_alone_unscales_once() -> None:
    """Without `unscale_`, and with a loop that has no loader."""
    with paceline.init() as run:
        model, scaler = build(), scaler_of()
        model, optimizer = run.setup(model, make("sgd", model), strategy=Strategy(accumulate=2))
        x, y = (tensor[:8] for tensor in data().tensors)
        for _ in range(2):
            for part in (slice(0, 4), slice(4, 8)):
                run.backward(scaler.scale((model(x[part]) - y[part]).pow(2).mean()))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert scaler.state_dict()["_growth_tracker"] == 0
        assert scaler.get_scale() == 2 * SCALE  # after two steps
    other = build()
    optimizer = make("sgd", other)
    for _ in range(2):
        (other(x) - y).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert values(model) == pytest.approx(values(other), rel=1e-4, abs=1e-5)


def test_loops_that_ask_whether_the_run_accumulates_go_on_as_before() -> None:
    with paceline.init() as run:
        model, scaler = build(), scaler_of()
        model, optimizer = run.setup(model, make("sgd", model), strategy=Strategy(accumulate=2))
        x, y = (tensor[:4] for tensor in data().tensors)
        for _ in range(4):
            run.backward(scaler.scale((model(x) - y).pow(2).mean()))
            scaler.step(optimizer)
            if not run.accumulating:
                scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 2 * SCALE


def test_a_scale_that_would_change_within_an_accumulation_is_refused() -> None:
    with paceline.init() as run:
        one, two, scaler = build(), build(), scaler_of()
        one, fast = run.setup(one, torch.optim.SGD(one.parameters(), 0.1))
        two, slow = run.setup(two, torch.optim.Adam(two.parameters()), strategy=Strategy(accumulate=2))
        x = torch.ones(2, 3)
        run.backward(scaler.scale(one(x).sum()))
        scaler.step(fast)
        run.backward(scaler.scale(two(x).sum()))
        scaler.step(slow)
        with pytest.raises(RuntimeError, match=r"has unscaled the gradients of SGD while Adam accumulates.* for each"):
            scaler.update()
        run.backward(scaler.scale(two(x).sum()))
        scaler.step(slow)
        scaler.update()
        run.backward(scaler.scale(two(x).sum()))
        scaler.step(slow)
        with pytest.raises(RuntimeError, match=r"scaler\.update\(8\.0\) while Adam accumulates"):
            scaler.update(8.0)


def test_scalers_of_other_optimizers_and_switched_off_are_torchs() -> None:
    with paceline.init() as run:
        model = build()
        model, optimizer = run.setup(model, make("sgd", model), strategy=Strategy(accumulate=2))
        off = torch.amp.GradScaler("cpu", enabled=False)
        before = values(model)
        for _ in range(2):
            run.backward(off.scale(model(torch.ones(2, 3)).sum()))
            off.unscale_(optimizer)
            off.step(optimizer)
            off.update()
        assert values(model) != before
    other, scaler = build(), scaler_of()
    optimizer = make("sgd", other)
    scaler.scale(other(torch.ones(2, 3)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called on this optimizer"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.update()


# -- ranks that train alone --------------------------------------------------------------------------------------------


def alone(
    sync: Any, overflows: dict[int, Sequence[int]], steps: int, scales: bool = True
) -> tuple[list[list[float]], float, int]:
    """`overflows`: the steps in which the gradients of each rank overflow. What each rank has after every step."""
    with paceline.init() as run:
        model, scaler = build(), scaler_of() if scales else torch.amp.GradScaler("cpu", enabled=False)
        model, optimizer = run.setup(model, make("sgd", model), strategy=Strategy(sync=sync))
        x, y = data().tensors
        found = []
        for step in run.steps(range(steps)):
            mine = slice(4 * run.rank + step, 4 * run.rank + step + 4)
            loss = (model(x[mine]) - y[mine]).pow(2).mean()
            loss = loss * (torch.inf if step in overflows.get(run.rank, ()) else 1.0)
            run.backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append(values(model))
        return found, scaler.get_scale(), run.step


def alone_by_hand(overflows: dict[int, Sequence[int]], steps: int, every: int) -> list[list[list[float]]]:
    """LocalSGD, momentum included, with plain torch and without a scaler."""
    models = [build() for _ in range(2)]
    optimizers = [make("sgd", model) for model in models]
    x, y = data().tensors
    found: list[list[list[float]]] = [[], []]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if step in overflows.get(rank, ()):
                continue
            mine = slice(4 * rank + step, 4 * rank + step + 4)
            optimizer.zero_grad()
            (model(x[mine]) - y[mine]).pow(2).mean().backward()
            optimizer.step()
        if (step + 1) % every == 0:
            with torch.no_grad():
                for same in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack(list(same)).mean(0)
                    for each in same:
                        each.copy_(mean)
                kept = [[each["momentum_buffer"] for each in one.state.values()] for one in optimizers]
                if all(kept):
                    for buffers in zip(*kept, strict=True):
                        mean = torch.stack(list(buffers)).mean(0)
                        for buffer in buffers:
                            buffer.copy_(mean)
        for rank, model in enumerate(models):
            found[rank].append(values(model))
    return found


@pytest.mark.parametrize("overflows", [{1: (0, 4)}, {0: (2,), 1: (5, 6)}, {0: (0, 1, 2)}])
def test_a_rank_of_local_sgd_that_skips_steps_stays_in_step(overflows: dict[int, Sequence[int]]) -> None:
    expected = alone_by_hand(overflows, 8, 3)
    results = launch(alone, (LocalSGD(every=3, warmup=0, momentum="average"), overflows, 8), 2)
    for (mine, scale, steps), theirs, rank in zip(results, expected, range(2), strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
        assert steps == 8
        assert (scale < SCALE * 16) == bool(overflows.get(rank))


@pytest.mark.parametrize(
    "sync",
    [
        DiLoCo(every=4, fragments=2),
        LocalSGD(every=2, warmup=3),
        LocalSGD(every="auto", initial=2, warmup=0),
        "fp16",
        "int8",
    ],
)
def test_a_rank_that_overflows_does_not_end_the_job(sync: Any) -> None:
    """Also in the first step, where the optimizer has no state yet, and where ranks exchange gradients."""
    (one, _, steps), (other, _, others) = launch(alone, (sync, {1: (0, 5)}, 8), 2)
    assert steps == others == 8
    assert all(value == value and abs(value) < 100 for value in (*one[-1], *other[-1]))


def test_how_often_ranks_average_does_not_depend_on_the_scale() -> None:
    """It depends on the loss; the scale doubles several times."""
    sync = LocalSGD(every="auto", initial=3, warmup=0)
    for (scaled, _, _), (plain, _, _) in zip(
        launch(alone, (sync, {}, 12), 2), launch(alone, (sync, {}, 12, False), 2), strict=True
    ):
        for one, other in zip(scaled, plain, strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


# -- checkpoints and counts --------------------------------------------------------------------------------------------


def test_a_step_that_the_scaler_skips_is_a_step(tmp_path: Path) -> None:
    """Of a loop by hand too, and `run.save` after it holds all that there is."""
    with paceline.init(checkpoint_dir=tmp_path) as run:
        model, scaler = build(), scaler_of()
        model, optimizer = run.setup(model, make("sgd", model))
        run.register(scaler=scaler)
        for _ in run.steps(range(2)):
            run.backward(scaler.scale(model(torch.ones(2, 3)).sum() * torch.inf))
            scaler.step(optimizer)
            scaler.update()
            run.save()  # before zero_grad
            optimizer.zero_grad()
        run.save(block=True)
    with paceline.init(checkpoint_dir=tmp_path) as run:
        model, scaler = build(), scaler_of()
        model, optimizer = run.setup(model, make("sgd", model))
        run.register(scaler=scaler)
        assert run.resume()
        assert (run.step, scaler.get_scale()) == (2, SCALE / 4)


def test_a_loop_by_hand_counts_steps_that_the_scaler_skips() -> None:
    with paceline.init() as run:
        model, scaler = build(), scaler_of()
        model, optimizer = run.setup(model, make("sgd", model))
        for number in range(4):
            assert run.step == number
            run.backward(scaler.scale(model(torch.ones(2, 3)).sum() * (torch.inf if number == 1 else 1)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert run.step == 4
        assert scaler.get_scale() == SCALE  # halved once, and doubled after two more
