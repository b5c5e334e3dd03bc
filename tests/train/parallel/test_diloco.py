"""DiLoCo: ranks train alone for many steps, and an outer optimizer steps by what they have learned."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from tests.conftest import eventually  # noqa: E402
from tests.train.launching import launch, say  # noqa: E402
from tests.train.parallel.test_methods import batch, build, loss_of  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import paceline  # noqa: E402
from paceline import DiLoCo  # noqa: E402
from paceline.train.group import shared_memory  # noqa: E402
from paceline.train.parallel.sync import build as builder  # noqa: E402
from paceline.train.parallel.sync.methods.diloco import deal  # noqa: E402

pytestmark = pytest.mark.torch
WIRES: list[Any] = ["fp32", "fp16", "int8", "int4"]


def optimizer_of(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), 0.01)


def over_sockets(ranks: int = 1) -> None:
    """Let so many ranks of this machine be a machine of their own, so that what those send is compressed."""
    builder.make_groups = lambda group, options: [
        list(range(first, first + ranks)) for first in range(0, group.world_size, ranks)
    ]


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=9), data=st.data())
def test_fragments_have_all_layers_and_similar_sizes(sizes: list[int], data: Any) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1, size) for size in sizes))
    count = data.draw(st.integers(1, len(sizes)))
    fragments = deal(model, count)
    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    numbers = [[places[id(parameter)] for parameter in fragment.parameters] for fragment in fragments]
    assert sorted(number for each in numbers for number in each) == list(range(2 * len(sizes)))
    assert all({number ^ 1 for number in each} == set(each) for each in numbers)  # layers are whole
    totals = [sum(parameter.numel() for parameter in fragment.parameters) for fragment in fragments]
    assert [fragment.key for fragment in fragments] == list(enumerate(totals))
    assert max(totals) - min(totals) <= 2 * max(sizes)


# -- a real problem ----------------------------------------------------------------------------------------------------


def converged(sync: Any) -> tuple[float, float, bool]:
    """The loss on unseen data before and after training, and whether all ranks have the same model."""
    over_sockets()
    with paceline.init(seed=1, progress=False) as run:
        model = build()
        model, optimizer = run.setup(model, optimizer_of(model), strategy=paceline.Strategy(sync=sync))
        x = torch.randn(640, 6, generator=torch.Generator().manual_seed(1))
        unseen = torch.randn(200, 6, generator=torch.Generator().manual_seed(2))
        train = run.dataloader(TensorDataset(x), global_batch_size=32, shuffle=True)

        def loss() -> float:
            model.eval()
            with torch.no_grad():
                found = float(loss_of(model, unseen))
            model.train()
            return found

        before = loss()
        for _ in run.epochs(12):
            for (samples,) in train:
                optimizer.zero_grad()
                run.backward(loss_of(model, samples))
                run.clip_grad_norm(5.0)
                optimizer.step()
        values = torch.cat([each.flatten().double() for each in model.state_dict().values()])
        return before, loss(), all(torch.equal(values, each) for each in run.all_gather(values))


@pytest.mark.parametrize("wire", ["int4", pytest.param("fp16", marks=pytest.mark.nightly)])
def test_it_trains(wire: Any) -> None:
    results = launch(converged, (DiLoCo(every=8, fragments=2, delay=3, wire=wire),), 3)
    _, exact, _ = launch(converged, ("allreduce",), 3)[0]
    for before, after, is_same in results:
        assert is_same
        assert after < before / 5
        assert after < 2 * exact


# -- failures ----------------------------------------------------------------------------------------------------------


def fails_within(folder: str) -> None:
    """An exchange fails on rank 1 while the training goes on."""
    with paceline.init() as run:
        if run.rank == 1:
            shared_memory._add = refuse
        model = build()
        strategy = paceline.Strategy(sync=DiLoCo(every=4, fragments=1, delay=2))
        model, optimizer = run.setup(model, optimizer_of(model), strategy=strategy)
        for step in range(1, 9):
            run.backward(loss_of(model, batch(run.rank, step)))
            try:
                optimizer.step()
            except RuntimeError as error:
                say(Path(folder, str(run.rank)), f"{step}: {error}")
                if run.rank == 0:  # whose end would end rank 1 before it comes to this step
                    eventually(Path(folder, "1").exists, "rank 1 says why")
                raise


def refuse(*_: Any) -> None:
    raise MemoryError("no room for the sum")


def test_a_failed_exchange_ends_the_run_when_its_result_is_due(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        launch(fails_within, (str(tmp_path),), 2)
    said = (tmp_path / "1").read_text()
    assert said == "6: the exchange of parameters failed: no room for the sum"


# -- other features ----------------------------------------------------------------------------------------------------


def with_all_features() -> tuple[list[bool], list[bool], list[float], list[float]]:
    """Two models with accumulation, a scheduler, a frozen and an unused parameter."""
    with paceline.init() as run:
        models, optimizers, schedulers = [], [], []
        for frozen in (True, False):
            model = build()
            model.add_module("unused", torch.nn.Linear(2, 2))
            model.forward = lambda x, m=model: m[3](m[2](m[1](m[0](x))))
            model[3].bias.requires_grad_(not frozen)
            strategy = paceline.Strategy(
                sync=DiLoCo(every=2, fragments=2, overlap=False), accumulate=2, find_unused_parameters=True
            )
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05, momentum=0.9)
            model, optimizer = run.setup(model, optimizer, strategy=strategy)
            models.append(model)
            optimizers.append(optimizer)
            schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        frozen_before = models[0].module[3].bias.tolist()
        same: list[list[bool]] = []
        for x in run.steps([batch(run.rank, step) for step in range(6)]):
            for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
                run.backward(loss_of(model, x))
                optimizer.step()
                optimizer.zero_grad()
                if not run.accumulating:
                    scheduler.step()
            values = torch.cat([p.detach().flatten() for model in models for p in model.parameters()])
            same.append([bool(torch.equal(values, each)) for each in run.all_gather(values)])
        values = torch.cat([p.detach().flatten() for model in models for p in model.parameters()])
        same.append([bool(torch.equal(values, each)) for each in run.all_gather(values)])
        rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
        is_frozen = models[0].module[3].bias.tolist() == frozen_before
        return [all(each) for each in same], [is_frozen], rates, values.tolist()


def test_other_features() -> None:
    for same, frozen, rates, values in launch(with_all_features, (), 2):
        assert same == [True, False, False, False, False, False, True]
        assert frozen == [True]
        assert rates == [pytest.approx(0.05 / 8)] * 2
        assert bool(torch.tensor(values).isfinite().all())


def sent(folder: str) -> None:
    over_sockets()
    for wire in WIRES:
        with paceline.init(log_dir=f"{folder}/{wire}", log_every=8, progress=False) as run:
            model = build()
            strategy = paceline.Strategy(sync=DiLoCo(every=8, fragments=2, wire=wire, overlap=False))
            model, optimizer = run.setup(model, optimizer_of(model), strategy=strategy)
            for x in run.steps([batch(run.rank, step) for step in range(32)]):
                optimizer.zero_grad()
                run.backward(loss_of(model, x))
                optimizer.step()


# one of two ranks, in a cycle: fragments of 280 and 203 parameters, each in blocks of 256, as many for both ranks
PER_CYCLE = {"fp32": 483 * 4, "fp16": (280 + 204) * 2, "int8": (2 + 2) * 260, "int4": (2 + 2) * 132}


def test_metrics_have_the_bytes_sent_per_step(tmp_path: Path) -> None:
    launch(sent, (str(tmp_path),), 2)
    for wire, expected in PER_CYCLE.items():
        lines = [json.loads(line) for line in (tmp_path / wire / "metrics.jsonl").read_text().splitlines()]
        assert [line["sent_bytes"] for line in lines[:3]] == [round(expected / 8)] * 3, wire


WAITING = 0.4  # seconds that rank 1 comes later


def slow(folder: str) -> None:
    waits = Path(folder, "rank-0-waits")
    all_reduce = shared_memory.SharedMemory.all_reduce

    def noted(memory: Any, *args: Any) -> None:
        waits.touch()
        all_reduce(memory, *args)

    with paceline.init(log_dir=folder, log_every=4, progress=False) as run:
        model = build()
        strategy = paceline.Strategy(sync=DiLoCo(every=4, fragments=1, overlap=False))
        model, optimizer = run.setup(model, optimizer_of(model), strategy=strategy)
        for step, x in enumerate(run.steps([batch(run.rank, step) for step in range(8)])):
            optimizer.zero_grad()
            run.backward(loss_of(model, x))
            if step == 3 and run.rank == 0:
                shared_memory.SharedMemory.all_reduce = noted
            if step == 3 and run.rank == 1:
                eventually(waits.exists, "rank 0 exchanges")
                time.sleep(WAITING)  # it is what the other rank waits for
            optimizer.step()


def test_metrics_have_the_time_of_waiting_for_outer_steps(tmp_path: Path) -> None:
    launch(slow, (str(tmp_path),), 2)
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert line["sync_seconds"] >= WAITING / 2 / 4 * 0.9  # the mean of two ranks and four steps


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0 is not a number of 1 or more"),
        ({"fragments": 0}, "fragments=0 is not"),
        ({"delay": 0}, "delay=0 is not"),
        ({"outer_lr": 0}, "outer_lr=0 is not more than 0"),
        ({"outer_lr": float("nan")}, "outer_lr=nan"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0 is not from 0"),
        ({"wire": "int2"}, "wire='int2' is none of 'fp32', 'fp16', 'int8', 'int4'"),
    ],
)
def test_bad_options(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiLoCo(**options)


def test_its_name() -> None:
    assert paceline.Strategy(sync="diloco(3)").method == DiLoCo(every=3)
    with pytest.raises(ValueError, match="every=0 is not"):
        paceline.Strategy(sync="diloco(0)")


def refused() -> list[str]:
    """What each script is told before its first step."""
    said = []

    def refuse(model: Any, sync: Any) -> None:
        with paceline.init() as run:
            with pytest.raises((ValueError, RuntimeError)) as error:
                model = run.setup(model, strategy=paceline.Strategy(sync=sync(run.rank)))
                run.backward(loss_of(model, batch(run.rank, 0)))
            said.append(str(error.value))

    refuse(build(), lambda _: DiLoCo(fragments=4))
    with_integers = build()
    with_integers.register_parameter("table", torch.nn.Parameter(torch.arange(3), requires_grad=False))
    refuse(with_integers, lambda _: DiLoCo(fragments=2, wire="int4"))
    refuse(torch.nn.Linear(6, 3, dtype=torch.complex64), lambda _: DiLoCo(fragments=1))
    refuse(build(), lambda _: DiLoCo(fragments=2))
    refuse(build(), lambda rank: DiLoCo(fragments=2, every=8 + rank))
    return said


def test_what_diloco_cannot_do() -> None:
    one, other = launch(refused, (), 2)
    assert one[:4] == other[:4]
    messages = [
        "fragments=4 is more than the 3 layers of Sequential that have trained parameters; pass fragments=3 or less",
        "the parameter table of type torch.int64 cannot be sent as int4; use DiLoCo(wire='fp32'), or make it a buffer",
        "the parameter weight of type torch.complex64 cannot be sent as fp16; use DiLoCo(wire='fp32')",
        "DiLoCo(fragments=2) must know the optimizer; pass the one of Sequential to run.setup, after the model",
    ]
    assert one[:4] == messages
    assert "Strategy(sync=DiLoCo(every=9" in other[4]
    assert "rank 1 differs" in one[4]
    assert all("\n" not in line for line in one + other)


def around(_: None) -> list[float]:
    """Train by PyTorch's own calls."""
    over_sockets()
    with paceline.init(seed=1, progress=False) as run:
        model = build()
        sync = DiLoCo(every=2, fragments=1, overlap=False, wire="fp32")
        model, optimizer = run.setup(model, optimizer_of(model), strategy=paceline.Strategy(sync=sync))
        x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
        for _ in run.epochs(1):
            for (part,) in run.dataloader(TensorDataset(x), batch_size=8):
                loss_of(model, part).backward()
                optimizer.step()
                optimizer.zero_grad()
        return [float(each.detach().double().sum()) for each in model.parameters()]


def test_ranks_come_together_without_run_backward() -> None:
    first, second = launch(around, (None,), 2)
    assert first == second


def with_closure() -> None:
    with paceline.init() as run:
        model = build()
        optimizer = torch.optim.LBFGS(model.parameters())
        model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(sync=DiLoCo(fragments=1)))

        def closure() -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, batch(run.rank, 0))
            run.backward(loss)
            return loss

        optimizer.step(closure)


def test_closures_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"with DiLoCo\(fragments=1\) each rank steps alone"):
        launch(with_closure, (), 2)
