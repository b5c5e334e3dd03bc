"""Deep gradient compression: the algorithm of its paper, beside the library."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402

import paceline  # noqa: E402
from paceline import DGC, AllReduce  # noqa: E402

pytestmark = pytest.mark.torch
ALONE: Any = {"hierarchical": False}  # so that ranks of one machine are as those of several
PAIRS: Any = {"hierarchical": ((0, 1), (2, 3))}


class Uneven(torch.nn.Module):
    """Parameters of no, one, two and three dimensions, of 1 to 2000 values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = torch.nn.Linear(9, 200)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.one = torch.nn.Parameter(torch.ones(1, 1))
        self.mixed = torch.nn.Parameter(torch.randn(2, 10, 100) * 0.1)
        self.last = torch.nn.Linear(10, 3)

    def forward(self, x: Any) -> Any:
        hidden = self.first(x).tanh().view(-1, 2, 100)
        return self.last(torch.einsum("bih,ioh->bo", hidden, self.mixed).tanh()) * self.scale * self.one


def batch(rank: int, step: int) -> Any:
    return torch.randn(6, 9, generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(model: Any, x: Any) -> Any:
    return (model(x) - x[:, :3].sin()).square().mean()


def values(model: Any) -> list[float]:
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def trained(cases: Any, steps: int) -> list[tuple[list[float], float]]:
    """With each method and options of SGD: the parameters, and the mean loss of the last step."""
    return [_trained(sync, options, steps) for sync, options in cases]


def _trained(sync: Any, options: Any, steps: int) -> tuple[list[float], float]:
    with paceline.init() as run:
        model: Any = Uneven()
        optimizer = torch.optim.SGD(model.parameters(), **options)
        model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(sync=sync))
        loss = torch.zeros(())
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model, batch(run.rank, step))
            run.backward(loss)
            optimizer.step()
        assert optimizer.param_groups[0]["momentum"] == options.get("momentum", 0)
        return values(model), run.mean(float(loss), 1)


def by_hand(groups: Any, sync: DGC, options: Any, steps: int) -> list[float]:
    """The paper's algorithm for momentum, with local clipping; a group of ranks is one of the paper's nodes."""
    model = Uneven()
    parameters = list(model.parameters())
    m, decay = options.get("momentum", 0.0), options.get("weight_decay", 0.0)
    momenta = [[torch.zeros_like(p) for p in parameters] for _ in groups]
    unsent = [[torch.zeros_like(p) for p in parameters] for _ in groups]
    ranks = sum(map(len, groups))
    for step in range(steps):
        steps_of = [torch.zeros_like(p) for p in parameters]
        stage = (
            4 if step >= sync.warmup + sync.rampup or step < sync.warmup else (step - sync.warmup) * 4 // sync.rampup
        )
        fraction = 1.0 if step < sync.warmup else sync.fraction ** ((stage + 1) / 5)
        for node, group in enumerate(groups):
            model.zero_grad()
            (sum(loss_of(model, batch(rank, step)) for rank in group) / ranks).backward()
            gradients = [p.grad.clone() for p in parameters]
            if sync.clip is not None:
                norm = torch.cat([g.flatten() for g in gradients]).norm()
                gradients = [g * min(1.0, sync.clip / math.sqrt(len(groups)) / float(norm)) for g in gradients]
            for p, g, u, v, total in zip(parameters, gradients, momenta[node], unsent[node], steps_of, strict=True):
                g.add_(p.detach(), alpha=decay / len(groups))
                if options.get("nesterov"):
                    u.add_(g).mul_(m)
                    v.add_(u + g)
                else:
                    u.mul_(m).add_(g)
                    v.add_(u)
                count = math.ceil(fraction * p.numel())
                if p.dim() < 2 or 2 * count >= p.numel():
                    total.add_(v)
                    v.zero_()
                else:
                    threshold = v.abs().flatten().topk(count).values[-1]
                    mask = v.abs() >= threshold
                    total.add_(v * mask)
                    v.mul_(~mask)
                    u.mul_(~mask)
        with torch.no_grad():
            for p, total in zip(parameters, steps_of, strict=True):
                p.sub_(total, alpha=options["lr"])
    return values(model)


PLAIN = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
NESTEROV = {"lr": 0.1, "momentum": 0.8, "nesterov": True}
CASES = [
    (DGC(fraction=0.01, warmup=2, rampup=5, **ALONE), PLAIN),
    (DGC(fraction=0.05, rampup=0, clip=0.05, **ALONE), NESTEROV),
    (DGC(fraction=0.02, rampup=3, clip=0.2, **PAIRS), PLAIN),
]


def test_it_is_the_algorithm_of_the_paper() -> None:
    first, *others = launch(trained, (CASES, 12), 4)
    assert others == [first] * 3
    for (sync, options), (found, _) in zip(CASES, first, strict=True):
        groups = sync.hierarchical or [[rank] for rank in range(4)]
        assert found == pytest.approx(by_hand(groups, sync, options, 12), rel=1e-4, abs=1e-5), sync


def test_it_trains_as_exact_gradients_do_and_is_these_on_one_machine() -> None:
    cases = [
        (AllReduce(), PLAIN), (DGC(fraction=0.01), PLAIN), (DGC(fraction=0.05, rampup=20, **ALONE), PLAIN),
        (DGC(warmup=80, **ALONE), PLAIN),
    ]  # fmt: skip
    for exact, here, compressed, whole in launch(trained, (cases, 80), 2):
        assert here == exact
        assert compressed[1] < 1.2 * exact[1]
        assert whole[0] == pytest.approx(exact[0], rel=1e-4, abs=1e-5)


def lost() -> float:
    """The largest difference between the sum of all gradients, and what was exchanged and what is kept of them."""
    with paceline.init() as run:
        model, plain = Uneven(), Uneven()
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        sync = DGC(fraction=0.01, rampup=4, **ALONE)
        wrapped, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(sync=sync))
        own, exchanged = ([torch.zeros_like(p) for p in model.parameters()] for _ in range(2))
        for step in range(8):
            wrapped.zero_grad()
            plain.zero_grad()
            x = batch(run.rank, step)
            loss_of(plain, x).backward()
            run.backward(loss_of(wrapped, x))
            for total, p in zip(own, plain.parameters(), strict=True):
                total.add_(p.grad / run.world_size)
            for total, p in zip(exchanged, model.parameters(), strict=True):
                total.add_(p.grad)
        state = run._prepared.rank_parts()["run.sync-0"].thing.state_dict()["kept"]["wires"]["0"]["unsent"]
        differences = [
            run.all_reduce(mine - state[str(number)].view_as(mine)) - total
            for number, (mine, total) in enumerate(zip(own, exchanged, strict=True))
        ]
        return max(float(each.abs().max()) for each in differences)


def test_without_momentum_every_gradient_was_sent_or_is_kept() -> None:
    assert max(launch(lost, (), 3)) < 1e-5


def not_finite() -> list[bool]:
    """Whether a step with an infinite gradient is the only one that is not finite."""
    found = []
    with paceline.init() as run:
        model = Uneven()
        optimizer = torch.optim.SGD(model.parameters(), 0.0, 0.9)
        wrapped, _ = run.setup(model, optimizer, strategy=paceline.Strategy(sync=DGC(rampup=0, clip=1.0, **ALONE)))
        for step in range(4):
            wrapped.zero_grad()
            scale = float("inf") if step == 1 and run.rank == 0 else 1.0
            run.backward(loss_of(wrapped, batch(run.rank, step)) * scale)
            is_finite = all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
            found.append(is_finite == (step != 1))
    return found


def test_a_gradient_that_is_not_finite_spoils_one_step_alone() -> None:
    assert all(map(all, launch(not_finite, (), 2)))


def refused() -> list[str]:
    said = []
    for sync in (DGC(**ALONE), DGC(clip=1.0, **ALONE)):
        with paceline.init() as run:
            model: Any = Uneven()
            wrapped = run.setup(model, strategy=paceline.Strategy(sync=sync))
            for optimizer in (
                torch.optim.AdamW(model.parameters()),
                torch.optim.SGD(model.parameters(), 0.1, 0.9, dampening=0.1),
            ):
                with pytest.raises(ValueError, match="DGC knows") as error:
                    run.setup(optimizer)
                said.append(str(error.value))
            run.setup(torch.optim.SGD(model.parameters(), 0.1))
            run.backward(loss_of(wrapped, batch(run.rank, 0)))
            before = [p.grad.clone() for p in model.parameters()]
            try:
                run.clip_grad_norm(1e-3)
            except RuntimeError as error:
                said.append(str(error))
            assert all(torch.equal(p.grad, one) for p, one in zip(model.parameters(), before, strict=True))
    return said


def test_what_it_does_not_take() -> None:
    one, other = launch(refused, (), 2)
    assert one == other
    assert len(one) == 5
    assert "AdamW is another optimizer" in one[0]
    assert "dampening=…" in one[1]
    assert "DGC(clip=1.0)" in one[2]


@pytest.mark.parametrize("options", [{"fraction": 1.0}, {"warmup": -1}, {"rampup": -1}, {"clip": 0.0}])
def test_bad_options(options: Any) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        DGC(**options)
