"""Training that goes around what `Run.setup` returned: it is exchanged all the same, and equals that of one rank."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import paceline  # noqa: E402
from paceline.train.parallel.errors import ModelMismatch, NotExchanged  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch


def data() -> Any:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(48, 6, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(48, 1, generator=generator))


def build() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


class Around:
    """A training with two epochs, whose parts the cases replace."""

    sync: Any = None
    options: dict[str, Any] = {}  # noqa: RUF012 - a case has its own

    def __init__(self, run: paceline.Run) -> None:
        self.run = run
        self.origin = build()
        self.beside: list[Any] = []
        self.optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        strategy = paceline.Strategy(sync=self.sync, **self.options)
        self.model, _ = run.setup(self.origin, self.optimizer, strategy=strategy)
        self.after()

    def parameters(self) -> Any:
        return self.origin.parameters()

    def after(self) -> None:
        """What the script does after `run.setup`."""

    def epoch_begins(self, epoch: int) -> None:
        pass

    def loss(self, x: Any, y: Any) -> Any:
        return (self.model(x) - y).pow(2).mean()

    def backward(self, loss: Any) -> None:
        self.run.backward(loss)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self) -> list[float]:
        loader = self.run.dataloader(data(), global_batch_size=12, shuffle=True)
        for epoch in self.run.epochs(2):
            self.epoch_begins(epoch)
            for x, y in loader:
                self.backward(self.loss(x, y))
                self.step()
        return [v for p in (*self.origin.parameters(), *self.beside) for v in p.detach().double().flatten().tolist()]


class Original(Around):
    def loss(self, x: Any, y: Any) -> Any:
        return (self.origin(x) - y).pow(2).mean()


class PlainBackward(Original):
    def backward(self, loss: Any) -> None:
        loss.backward()


class EveryOther(PlainBackward):
    def loss(self, x: Any, y: Any) -> Any:
        return (self.model if self.run.step % 2 else self.model.module)(x).sub(y).pow(2).mean()


class PartOnSomeRanks(Original):
    def loss(self, x: Any, y: Any) -> Any:  # the first layer gets a gradient from the last rank alone
        hidden = self.origin[0](x)
        return (self.origin[2](hidden if self.run.rank == self.run.world_size - 1 else hidden.detach()) - y).mean()


class TwoBackwards(Around):
    def backward(self, loss: Any) -> None:
        self.run.backward(self.model(torch.ones(1, 6, device=self.run.device)).mean())
        self.run.backward(loss)


class Accumulated(PlainBackward):
    options = {"accumulate": 2}  # noqa: RUF012 - a constant

    def backward(self, loss: Any) -> None:
        self.run.backward(loss)


class Checkpointed(PlainBackward):
    def loss(self, x: Any, y: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        hidden = self.origin[1](self.origin[0](x))
        return (checkpoint(self.origin[2], hidden, use_reentrant=True) - y).pow(2).mean()


class Compressed(PlainBackward):
    sync = paceline.PowerSGD(rank=1, warmup=2)


class Double(Around):
    def after(self) -> None:
        self.model.double()

    def loss(self, x: Any, y: Any) -> Any:
        return super().loss(x.double(), y.double())


class OriginalDouble(Double):
    def after(self) -> None:
        self.origin.double()


class Bfloat16(Around):
    def after(self) -> None:
        self.model.to(torch.bfloat16)

    def loss(self, x: Any, y: Any) -> Any:
        return super().loss(x.bfloat16(), y.bfloat16())


class Unfrozen(Around):
    def parameters(self) -> Any:
        self.origin[0].requires_grad_(False)
        return self.origin.parameters()

    def epoch_begins(self, epoch: int) -> None:
        self.origin[0].requires_grad_(epoch == 1)


class Frozen(Around):
    def epoch_begins(self, epoch: int) -> None:
        self.origin[0].requires_grad_(epoch == 0)


class Adapter(Around):
    def after(self) -> None:
        torch.manual_seed(self.run.rank)  # they begin as rank 0's
        self.origin.add_module("adapter", torch.nn.Linear(1, 1).to(self.run.device))
        self.optimizer.add_param_group({"params": self.origin[3].parameters()})


class AdapterInAnOptimizerOfItsOwn(Around):
    def after(self) -> None:
        torch.manual_seed(0)
        self.origin.add_module("adapter", torch.nn.Linear(1, 1).to(self.run.device))
        self.own = torch.optim.SGD(self.origin[3].parameters(), 0.1)

    def step(self) -> None:
        self.own.step()
        self.own.zero_grad()
        super().step()


class InTheBackward(Around):
    def after(self) -> None:
        self.each = {p: torch.optim.SGD([p], 0.05) for p in self.origin.parameters()}
        self.add()

        def step(parameter: Any) -> None:
            self.each[parameter].step()
            self.each[parameter].zero_grad()

        for parameter in self.origin.parameters():
            parameter.register_post_accumulate_grad_hook(step)

    def add(self) -> None:
        self.run.setup(*self.each.values())

    def step(self) -> None:
        pass


class InThePlainBackward(InTheBackward):
    def add(self) -> None:
        self.run.leave_out(*self.each.values())

    def backward(self, loss: Any) -> None:
        loss.backward()


class ByHand(Around):
    def backward(self, loss: Any) -> None:
        parameters = list(self.origin.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient


class ByHandAfterAFailure(ByHand):
    def step(self) -> None:
        with contextlib.suppress(ZeroDivisionError):
            self.optimizer.step(lambda: 1 / 0)
        super().step()


class Loose(Around):
    """A temperature beside the model, as in CLIP."""

    def parameters(self) -> Any:
        self.temperature = torch.nn.Parameter(torch.ones(1) + self.run.rank)
        self.beside = [self.temperature]
        return [*self.origin.parameters(), self.temperature]

    def loss(self, x: Any, y: Any) -> Any:
        return super().loss(x, y) * self.temperature.exp() + self.temperature.pow(2).sum()


class LooseClipped(Loose):
    def step(self) -> None:
        self.run.clip_grad_norm(0.5)
        super().step()


class LooseAccumulated(Loose):
    options = {"accumulate": 2}  # noqa: RUF012 - a constant


class LooseOnSomeRanks(Loose):
    def loss(self, x: Any, y: Any) -> Any:
        loss = super().loss(x, y)
        return loss if self.run.rank else Around.loss(self, x, y)


class LooseOnSomeRanksPlainly(LooseOnSomeRanks):
    def backward(self, loss: Any) -> None:
        loss.backward()
        self.run.clip_grad_norm(1.0)


class LooseLater(Loose):
    def parameters(self) -> Any:
        return super().parameters()[:-1]

    def after(self) -> None:
        self.optimizer.add_param_group({"params": [self.temperature], "lr": 0.1})


CASES = [
    Around, Original, PlainBackward, EveryOther, TwoBackwards, Accumulated, Checkpointed, Compressed, Double,
    OriginalDouble, Unfrozen, Frozen, Adapter, AdapterInAnOptimizerOfItsOwn, InTheBackward, InThePlainBackward, ByHand,
    ByHandAfterAFailure, Loose, LooseClipped, LooseAccumulated, LooseLater,
]  # fmt: skip
ALIKE = [
    PartOnSomeRanks,
    LooseOnSomeRanks,
    LooseOnSomeRanksPlainly,
    Bfloat16,
]  # one rank computes something else, or with too few bits to compare


def train_all() -> dict[str, list[float]]:
    found = {}
    for case in (*CASES, *ALIKE):
        with paceline.init(seed=0, progress=False) as run:
            found[case.__name__] = case(run).train()
    return found


def test_what_goes_around_the_model_is_exchanged() -> None:
    (alone,) = launch(train_all)
    for nproc in (2, 3):
        first, *others = launch(train_all, nproc=nproc)
        for name, weights in first.items():
            assert [each[name] for each in others] == [weights] * (nproc - 1), name
        for case in CASES:
            assert first[case.__name__] == pytest.approx(alone[case.__name__], abs=1e-4), case.__name__


def resumed(case: type[Around], folder: str, stop: int) -> list[float] | None:
    keeps: Any = {"checkpoint_dir": folder, "checkpoint_every": 1} if folder else {}
    with paceline.init(seed=0, progress=False, **keeps) as run:
        training = case(run)

        class Killed(Exception):
            pass

        step = training.step

        def killing() -> None:
            step()
            if run.step == stop:
                raise Killed

        training.step = killing  # type: ignore[method-assign]
        try:
            return training.train()
        except Killed:
            return None


class UnfrozenByAGroup(Unfrozen):
    def parameters(self) -> Any:
        super().parameters()
        return self.origin[2].parameters()

    def epoch_begins(self, epoch: int) -> None:
        if epoch == 1:
            self.origin[0].requires_grad_(True)
            self.optimizer.add_param_group({"params": self.origin[0].parameters(), "lr": 0.01})


class LooseInALaterEpoch(Loose):
    def parameters(self) -> Any:
        return super().parameters()[:-1]

    def loss(self, x: Any, y: Any) -> Any:
        return super().loss(x, y) if len(self.optimizer.param_groups) == 2 else Around.loss(self, x, y)

    def epoch_begins(self, epoch: int) -> None:
        if epoch >= 1 and len(self.optimizer.param_groups) == 1:
            self.optimizer.add_param_group({"params": [self.temperature], "lr": 0.1})


class UnfrozenOnce(Unfrozen):
    def epoch_begins(self, epoch: int) -> None:
        if epoch == 1:
            self.origin[0].requires_grad_(True)


def resume_all(folder: str) -> list[tuple[str, bool]]:
    found = []
    for case in (Loose, LooseLater, LooseInALaterEpoch, UnfrozenOnce, UnfrozenByAGroup):
        whole = resumed(case, "", 0)
        for stop in (3, 6):
            there = f"{folder}/{case.__name__}-{stop}"
            resumed(case, there, stop)
            found.append((f"{case.__name__} {stop}", resumed(case, there, 0) == whole))
    return found


@pytest.mark.parametrize("nproc", [1, 2])
def test_what_is_trained_is_what_a_resumed_run_trains(nproc: int, tmp_path: Path) -> None:
    for seen in launch(resume_all, (str(tmp_path),), nproc):
        assert [name for name, is_equal in seen if not is_equal] == []


def unlike() -> str:
    with paceline.init(timeout=60) as run:
        model = build()
        beside = [torch.nn.Parameter(torch.ones(2 + run.rank))]
        with pytest.raises(ModelMismatch) as caught:
            run.setup(model, torch.optim.SGD([*model.parameters(), *beside], 0.1))
        return str(caught.value)


def test_loose_parameters_that_differ_between_ranks_are_refused() -> None:
    assert {seen[:60] for seen in launch(unlike, nproc=2)} == {
        "the optimizer of rank 1 has other parameters than that of ran"[:60]
    }


def followed() -> None:
    with paceline.init(timeout=60) as run:
        model = build()
        model[0].requires_grad_(False)
        strategy = paceline.Strategy(sync=paceline.LocalSGD(every=2))
        wrapped, _ = run.setup(model, torch.optim.SGD(model.parameters(), 0.1), strategy=strategy)
        model[0].requires_grad_(True)
        run.backward(wrapped(torch.ones(1, 6)).sum())


def test_a_method_that_keeps_what_it_has_of_each_parameter_does_not_follow() -> None:
    with pytest.raises(NotExchanged, match=r"have changed after run\.setup, and sync='local_sgd"):
        launch(followed, nproc=2)


class Forgotten(LooseInALaterEpoch):
    def epoch_begins(self, epoch: int) -> None:
        if epoch == 1 and self.run.step == 4:  # not when it is resumed there
            super().epoch_begins(epoch)


def forgets(folder: str) -> None:
    resumed(Forgotten, folder, 6)
    resumed(Forgotten, folder, 0)


def test_a_group_that_a_resumed_script_does_not_add_again_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"has group 1 of SGD, with parameters of no model: the script must add it"):
        launch(forgets, (str(tmp_path),))
