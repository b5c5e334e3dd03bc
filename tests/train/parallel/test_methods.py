"""What holds with every method of exchange: it does what one process computes by hand, and nothing is lost.

All methods run in one start of the ranks. That each resumes to the bit is in `test_resumed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402

import paceline  # noqa: E402
from paceline import AllReduce, DiLoCo, LocalSGD, PowerSGD, TopK  # noqa: E402
from paceline.train.parallel.sync import build as builder  # noqa: E402
from paceline.train.parallel.sync.options import EveryStep  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    Values = list[list[float]]  # of each tensor; lists, as tensors that a rank returns need shared memory

pytestmark = pytest.mark.torch
RANKS = 4
PAIRS = ((0, 1), (2, 3))
# Each with how far parameters may be from those that are computed by hand; None is as far as training goes.
EVERY_STEP: list[tuple[Any, float | None]] = [
    (AllReduce(), 1e-5), (AllReduce(hierarchical=False), 1e-5), (AllReduce(hierarchical=PAIRS), 1e-5),
    (AllReduce(communicators=2), 1e-5),
    (AllReduce(wire="fp16", hierarchical=False), 1e-3), (AllReduce(wire="bf16", hierarchical=PAIRS), 2e-2),
    (AllReduce(wire="fp16", hierarchical=False, communicators=2), 1e-3),
    (AllReduce(wire="int8", hierarchical=False), 2e-2), (AllReduce(wire="int8", hierarchical=PAIRS), 2e-2),
    (PowerSGD(rank=2, warmup=3, hierarchical=False), None), (TopK(fraction=0.2, hierarchical=False), None),
]  # fmt: skip
APART: list[tuple[Any, float]] = [
    (LocalSGD(every=4, warmup=0), 1e-5), (LocalSGD(every=4, warmup=0, momentum="average"), 1e-5),
    (LocalSGD(every=4, warmup=0, hierarchical=PAIRS), 1e-5),
    (LocalSGD(every=4, warmup=0, hierarchical=((0, 2, 3), (1,))), 1e-5),
    (LocalSGD(every=4, warmup=0, hierarchical=True), 1e-5), (LocalSGD(every=3, warmup=5), 1e-5),
    (DiLoCo(every=4, fragments=1, overlap=False, wire="fp32"), 1e-5),
    (DiLoCo(every=4, outer_lr=1.0, outer_momentum=0.0, fragments=2, overlap=False, wire="fp32"), 1e-5),
    (DiLoCo(every=7, fragments=3, overlap=False, wire="fp32"), 1e-5),
    (DiLoCo(every=6, fragments=3, delay=3, wire="fp32"), 1e-5), (DiLoCo(every=2, fragments=3, wire="fp32"), 1e-5),
]  # fmt: skip
# Two ranks are a machine here, so that what machines send is compressed; of an outer step of 0.01 to 0.1 (`bits`).
WIRES: list[tuple[Any, float]] = [
    (DiLoCo(every=3, fragments=2, overlap=False, wire=wire), bits)  # type: ignore[arg-type]
    for wire, bits in {"fp32": 1e-5, "fp16": 1e-4, "int8": 1e-3, "int4": 2e-2}.items()
]
LOSSY = [sync for sync, tolerance in EVERY_STEP if tolerance is None]
METHODS = [*EVERY_STEP, *APART, *WIRES]


def build() -> Any:
    """Three layers, of 280, 80 and 123 parameters, of which the second has buffers."""
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 3)
    )


def batch(rank: int, step: int) -> Any:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(model: Any, x: Any) -> Any:
    return (model(x) - x[:, :3].sin()).square().mean()


def optimizer_of(model: Any, sync: Any) -> Any:
    if isinstance(sync, DiLoCo):
        return torch.optim.AdamW(model.parameters(), 0.01)
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9 if isinstance(sync, LocalSGD) else 0.0)


def steps_of(sync: Any) -> int:
    if isinstance(sync, EveryStep):
        return 40 if sync in LOSSY or sync == AllReduce() else 12
    return (
        3 if any(sync is each for each, _ in WIRES) else 15
    )  # what few bits lose in an outer step grows in later ones


def values(model: Any, sync: Any) -> Values:
    """The parameters, and the buffers where ranks have their own."""
    tensors = model.state_dict().values() if isinstance(sync, LocalSGD) and not sync.warmup else model.parameters()
    return [each.detach().double().flatten().tolist() for each in tensors]


# -- by hand -----------------------------------------------------------------------------------------------------------


def by_hand(sync: Any) -> list[list[Values]]:
    """What each rank has after every step, if nothing is lost by few bits."""
    models = [build() for _ in range(RANKS)]
    optimizers = [optimizer_of(model, sync) for model in models]
    outer = Outer(sync, models) if isinstance(sync, DiLoCo) else None
    found: list[list[Values]] = [[] for _ in models]
    for step in range(steps_of(sync)):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()
        for group in groups_of(sync, step):
            average([[p.grad for p in models[rank].parameters()] for rank in group])
        for optimizer in optimizers:
            optimizer.step()
        if isinstance(sync, LocalSGD) and step >= sync.warmup and (step + 1 - sync.warmup) % int(sync.every) == 0:
            average(
                [[each for each in model.state_dict().values() if each.dtype.is_floating_point] for model in models]
            )
            if sync.momentum == "average":
                average([[kept["momentum_buffer"] for kept in each.state.values()] for each in optimizers])
        if outer is not None:
            outer.step(step + 1)
        for rank, model in enumerate(models):
            found[rank].append(values(model, sync))
    return found


def groups_of(sync: Any, step: int) -> Sequence[Sequence[int]]:
    """The ranks that average their gradients in a step."""
    if isinstance(sync, DiLoCo):
        return []
    if isinstance(sync, EveryStep) or step < sync.warmup or sync.hierarchical is True:
        return [range(RANKS)]
    return sync.hierarchical or []


def average(lists: Sequence[Sequence[Any]]) -> None:
    with torch.no_grad():
        for same in zip(*lists, strict=True):
            mean = torch.stack(list(same)).mean(0)
            for each in same:
                each.copy_(mean)


class Outer:
    """The outer optimizer of DiLoCo is torch.optim.SGD."""

    def __init__(self, sync: DiLoCo, models: Sequence[Any]) -> None:
        fragments = {1: [[0, 2, 3]], 2: [[0], [2, 3]], 3: [[0], [3], [2]]}[sync.fragments]
        self._sync, self._sent = sync, dict[int, list[Any]]()
        self._delay = min(sync.delay, sync.every - 1) if sync.overlap else 0
        self._common, *self._local = (
            [[p for layer in each for p in model[layer].parameters()] for each in fragments]
            for model in (build(), *models)
        )
        rates = {"lr": sync.outer_lr, "momentum": sync.outer_momentum, "nesterov": sync.outer_momentum > 0}
        self._optimizers = [torch.optim.SGD(each, **rates) for each in self._common]

    @torch.no_grad()
    def step(self, step: int) -> None:
        every = self._sync.every
        for number, optimizer in enumerate(self._optimizers):
            turn = (number + 1) * every // self._sync.fragments % every
            places = list(zip(self._common[number], *(each[number] for each in self._local), strict=True))
            if step % every == turn:
                self._sent[number] = [torch.stack([p - own for own in mine]).mean(0) for p, *mine in places]
            if step > self._delay and (step - self._delay) % every == turn:
                for (p, *_), gradient in zip(places, self._sent.pop(number), strict=True):
                    p.grad = gradient
                optimizer.step()
                for p, *mine in places:
                    for own in mine:
                        own.copy_(0.5 * own + 0.5 * p if self._delay else p)


# -- by the ranks ------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a rank has seen of a method: see the tests."""

    after: list[Values]
    loss: float
    lost: float
    are_finite: list[bool]


def all_methods() -> list[Seen]:
    make_groups = builder.make_groups
    found = []
    for sync, _ in METHODS:
        if any(sync is each for each, _ in WIRES):
            builder.make_groups = lambda *_: [list(pair) for pair in PAIRS]
        found.append(one_method(sync))
        builder.make_groups = make_groups
    return found


def one_method(sync: Any) -> Seen:
    with paceline.init() as run:
        model, alone = build(), build()
        wrapped, optimizer = run.setup(
            model, optimizer_of(model, sync), strategy=paceline.Strategy(sync=sync, bucket_mb=1)
        )
        own, exchanged = ([torch.zeros_like(p) for p in model.parameters()] for _ in range(2))
        after, loss = [], torch.tensor(0.0)
        for step in range(steps_of(sync)):
            optimizer.zero_grad()
            alone.zero_grad()
            alone.load_state_dict(model.state_dict())
            loss_of(alone, batch(run.rank, step)).backward()
            loss = loss_of(wrapped, batch(run.rank, step))
            run.backward(loss)
            for sums, of in ((own, alone), (exchanged, model)):
                for total, p in zip(sums, of.parameters(), strict=True):
                    total.add_(p.grad)
            optimizer.step()
            after.append(values(model, sync))
        seen = Seen(after, run.mean(float(loss.detach()), 1), 0.0, [])
        if isinstance(sync, EveryStep):
            seen.lost = not_sent_and_not_kept(run, own, exchanged)
            seen.are_finite = [is_finite_after(run, wrapped, scale) for scale in (1.0, float("inf"), 1.0, 1.0)]
        return seen


def not_sent_and_not_kept(run: Any, own: Sequence[Any], exchanged: Sequence[Any]) -> float:
    """The largest difference between the mean of all gradients, and what was exchanged and what is kept of them."""
    part = run._prepared.rank_parts().get("run.sync-0")
    state = part.thing.state_dict()["kept"].get("wires", {}).get("0", {}) if part is not None else {}
    kept = state.get("residuals", state)
    differences = [
        run.all_reduce(mine / RANKS - kept.get(str(number), torch.zeros(1)).expand(mine.numel()).view_as(mine)) - total
        for number, (mine, total) in enumerate(zip(own, exchanged, strict=True))
    ]
    return max(float(each.abs().max()) for each in differences)


def is_finite_after(run: Any, model: Any, scale: float) -> bool:
    model.zero_grad()
    run.backward(loss_of(model, batch(run.rank, 99)) * (scale if run.rank == 0 else 1.0))
    return all(bool(p.grad.isfinite().all()) for p in model.parameters())


# -- the contract ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_ranks() -> list[list[Seen]]:
    """What all ranks have seen, by method."""
    return [list(each) for each in zip(*launch(all_methods, (), RANKS), strict=True)]


def numbered(cases: list[tuple[Any, Any]]) -> Any:
    return pytest.mark.parametrize(
        ("number", "sync", "tolerance"),
        [(number, *case) for number, case in enumerate(cases)],
        ids=[str(sync) for sync, _ in cases],
    )


@numbered(METHODS)
def test_ranks_have_what_one_process_computes(number: int, sync: Any, tolerance: Any, by_ranks: Any) -> None:
    expected, found = by_hand(sync), [seen.after for seen in by_ranks[number]]
    if tolerance is not None:
        torch.testing.assert_close(flat(found), flat(expected), rtol=1e-4, atol=tolerance)
    for step, tensors in enumerate(expected[0]):
        for place, values in enumerate(tensors):
            is_common = all(each[step][place] == values for each in expected)
            assert all(each[step][place] == found[0][step][place] for each in found) == is_common, (step, place)


def flat(ranks: list[list[Values]]) -> Any:
    return torch.tensor([[[*chain(*values)] for values in steps] for steps in ranks], dtype=torch.float64)


@numbered(EVERY_STEP)
def test_what_is_not_sent_is_kept(number: int, sync: Any, tolerance: Any, by_ranks: Any) -> None:
    bits = {"fp16": 1e-3, "bf16": 1e-2}.get(getattr(sync, "wire", ""), 1e-5)  # whose rounding is not kept
    assert max(seen.lost for seen in by_ranks[number]) < bits


@numbered(EVERY_STEP)
def test_a_gradient_that_is_not_finite_spoils_one_step_alone(
    number: int, sync: Any, tolerance: Any, by_ranks: Any
) -> None:
    assert [seen.are_finite for seen in by_ranks[number]] == [[True, False, True, True]] * RANKS


def test_it_trains_as_exact_gradients_do(by_ranks: Any) -> None:
    losses = {sync: seen[0].loss for (sync, _), seen in zip(METHODS, by_ranks, strict=True)}
    for sync in LOSSY:
        assert losses[sync] == pytest.approx(losses[AllReduce()], rel=0.2), sync
