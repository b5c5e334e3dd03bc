"""Optimizers that `run.setup` was not given, and loops that step by hand: a resumed run loses and repeats nothing."""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402
from torch.optim.optimizer import _global_optimizer_post_hooks  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import paceline  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.torch
STEPS, SAVED = 16, 4


class Killed(Exception):
    """Ends a run as a failure does."""


def build() -> Any:
    torch.manual_seed(1)
    return torch.nn.Linear(2, 1)


def train(model: Any, optimizer: Any, number: float = 1.0) -> None:
    (model(torch.full((1, 2), float(number))) - 1).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), 0.01)


# -- the state of every optimizer is in the checkpoints ----------------------------------------------------------------


def in_epochs(run: paceline.Run) -> None:
    model = run.setup(build())
    optimizer = adam(model)
    for _ in run.epochs(1):
        for number in range(3):
            train(model, optimizer, number)


def in_a_loader(run: paceline.Run) -> None:
    model = run.setup(build())
    optimizer = adam(model)
    for (x,) in run.dataloader(TensorDataset(torch.ones(4, 1)), batch_size=2):
        train(model, optimizer, float(x[0]))


def in_steps(run: paceline.Run) -> None:
    model = run.setup(build())
    optimizer = adam(model)
    for _ in run.steps(range(3)):
        train(model, optimizer)


def by_hand_after_resume(run: paceline.Run) -> None:
    model = run.setup(build())
    optimizer = adam(model)
    run.resume()
    train(model, optimizer)


@pytest.mark.parametrize("loop", [in_epochs, in_a_loader, in_steps, by_hand_after_resume])
def test_an_optimizer_that_was_not_set_up_is_refused_at_its_first_step(
    loop: Callable[[paceline.Run], None], tmp_path: Path
) -> None:
    said = r"Adam has stepped, but checkpoints .* run\.setup\(model, optimizer\) or run\.register\(name=optimizer\)"
    with paceline.init(checkpoint_dir=tmp_path, progress=False) as run, pytest.raises(RuntimeError, match=said):
        loop(run)
    assert not list(tmp_path.glob("step-*"))
    with paceline.init(progress=False) as run:  # nothing can be lost
        loop(run)


def test_a_loop_by_hand_is_refused_at_its_first_save(tmp_path: Path) -> None:
    with paceline.init(checkpoint_dir=tmp_path, progress=False) as run:
        model = run.setup(build())
        optimizer = adam(model)
        train(model, optimizer)
        with pytest.raises(RuntimeError, match="Adam has stepped"):
            run.save()
        run.register(optimizer=optimizer)
        run.save(block=True)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000001"]


def test_the_second_optimizer_of_a_gan_and_rates_of_a_scheduler_are_states_too(tmp_path: Path) -> None:
    with paceline.init(checkpoint_dir=tmp_path / "gan", progress=False) as run:
        maker, critic = run.setup(build(), build())
        makers, critics = run.setup(adam(maker)), adam(critic)
        with pytest.raises(RuntimeError, match="Adam has stepped"):
            for _ in run.steps(range(2)):
                train(maker, makers)
                train(critic, critics)
    with paceline.init(checkpoint_dir=tmp_path / "rates", progress=False) as run:
        model = run.setup(build())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.register(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))
        with pytest.raises(RuntimeError, match="SGD has stepped"):
            for _ in run.steps(range(2)):
                train(model, optimizer)


class Lookahead(torch.optim.Optimizer):
    """A wrapper that is an optimizer, and saves the state of its own one."""

    def __init__(self, base: Any) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups = base.param_groups

    def step(self, closure: Any = None) -> Any:
        self.state[self.param_groups[0]["params"][0]]["slow"] = torch.zeros(1)
        return self.base.step(closure)

    def state_dict(self) -> Any:
        return {"fast": self.base.state_dict(), "slow": super().state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.base.load_state_dict(state["fast"])


class Lars:
    """A wrapper that is none."""

    def __init__(self, base: Any) -> None:
        self.inner = [base]

    def step(self) -> None:
        self.inner[0].step()

    def zero_grad(self) -> None:
        self.inner[0].zero_grad()

    def state_dict(self) -> Any:
        return self.inner[0].state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner[0].load_state_dict(state)


class Forgetful(Lookahead):
    """A wrapper that loses the state of the optimizer in it."""

    def state_dict(self) -> Any:
        return super().state_dict()["slow"]


def schedule_free(base: Any) -> Any:
    """A wrapper of a package, for an optimizer that has no state before its first step."""
    inner = torch.optim.SGD(base.param_groups, 0.01, momentum=0.9)
    return pytest.importorskip("schedulefree").ScheduleFreeWrapper(inner)


@pytest.mark.parametrize("wrap", [Lookahead, Lars, schedule_free])
@pytest.mark.parametrize("how", ["register", "setup"])
def test_optimizers_inside_of_others_are_saved_with_them(wrap: Any, how: str, tmp_path: Path) -> None:
    with paceline.init(checkpoint_dir=tmp_path, progress=False) as run:
        model = run.setup(build())
        optimizer = wrap(adam(model))
        if how == "setup" and isinstance(optimizer, torch.optim.Optimizer):
            run.setup(optimizer)
        else:
            run.register(optimizer=optimizer)
        if hasattr(optimizer, "train"):
            optimizer.train()
        for _ in run.steps(range(3)):
            train(model, optimizer)
            run.save()
        assert run.step == 3


def test_a_step_by_which_torch_makes_a_state_trains_nothing(tmp_path: Path) -> None:
    """Neither counts nor uses a batch, of an optimizer that was set up, registered, or is no part of the run."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    numbers = []
    with paceline.init(checkpoint_dir=tmp_path, progress=False) as run:
        model, other, third = build(), build(), build()
        model, optimizer = run.setup(model, adam(model))
        registered, unknown = adam(other), adam(third)
        run.register(registered=registered)
        get_optimizer_state_dict(run.unwrap(model), optimizer)
        get_optimizer_state_dict(other, registered)
        assert run.step == 0
        optimizer.state.clear()
        registered.state.clear()
        for again in range(2):
            for number in run.steps(range(3)):
                get_optimizer_state_dict(run.unwrap(model), optimizer)
                get_optimizer_state_dict(other, registered)
                get_optimizer_state_dict(third, unknown)
                if not again:
                    break
                numbers.append(number)
                train(model, optimizer)
                run.save()
        assert run.step == 3
    assert numbers == [0, 1, 2]


@pytest.mark.parametrize("how", ["register", "setup"])
def test_optimizers_that_step_within_the_backward_use_their_batch(how: str, tmp_path: Path) -> None:
    """One for each parameter, in a hook: a loop that is left after the backward does not repeat its batch."""
    numbers = []
    with paceline.init(checkpoint_dir=tmp_path, progress=False) as run:
        model = run.setup(build())
        optimizers = {parameter: torch.optim.Adam([parameter], 0.01) for parameter in model.parameters()}
        if how == "setup":
            run.setup(*optimizers.values())
        else:
            run.register(**{f"adam{number}": one for number, one in enumerate(optimizers.values())})

        def step(parameter: Any) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        loader = run.dataloader(TensorDataset(torch.arange(4.0)), batch_size=1)
        for _ in range(2):
            for (number,) in loader:
                numbers.append(int(number))
                run.backward(model(number.expand(1, 2)).sum())
                if number == 1:
                    break
        assert run.step == 4
    assert numbers == [0, 1, 2, 3]


class Slotted:
    """A wrapper without a `__dict__`."""

    __slots__ = ("base",)

    def __init__(self, base: Any) -> None:
        self.base = base

    def state_dict(self) -> Any:
        return {"optimizer": self.base.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.base.load_state_dict(state["optimizer"])


def closed_over(base: Any) -> Any:
    """One whose methods use a variable of the script."""

    class Saved:
        def state_dict(self) -> Any:
            return {"optimizer": base.state_dict()}

        def load_state_dict(self, state: Any) -> None:
            base.load_state_dict(state["optimizer"])

    return Saved()


class WithOptimizer(torch.nn.Linear):
    """A model that saves its optimizer."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.optimizer = adam(self)

    def get_extra_state(self) -> Any:
        return self.optimizer.state_dict()

    def set_extra_state(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)


@pytest.mark.parametrize("wrap", [Slotted, closed_over])
def test_an_optimizer_is_found_however_its_wrapper_has_it(wrap: Any, tmp_path: Path) -> None:
    with paceline.init(checkpoint_dir=tmp_path, progress=False) as run:
        model = run.setup(build())
        optimizer = adam(model)
        run.register(optimizer=wrap(optimizer))
        for _ in run.steps(range(2)):
            train(model, optimizer)
            run.save()


def test_an_optimizer_is_found_in_the_model_that_saves_it(tmp_path: Path) -> None:
    with paceline.init(checkpoint_dir=tmp_path, progress=False) as run:
        made = WithOptimizer()
        model = run.setup(made)
        for _ in run.steps(range(2)):
            train(model, made.optimizer)
            run.save()


def test_an_optimizer_that_the_script_has_released_is_not_missed(tmp_path: Path) -> None:
    """Even if it is still there, since its scheduler has made it refer to itself."""
    with paceline.init(checkpoint_dir=tmp_path, progress=False) as run:
        probe = build()
        optimizer = adam(probe)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        gc.disable()
        try:
            train(probe, optimizer)
            del optimizer, scheduler
            model, kept = run.setup(build(), adam(build()))
            for _ in run.steps(range(2)):
                train(model, kept)
                run.save()
        finally:
            gc.enable()


def test_a_model_may_be_trained_before_the_loop(tmp_path: Path) -> None:
    """Its optimizer is no longer there when the run's loop begins, and every attempt begins with it anew."""
    with paceline.init(checkpoint_dir=tmp_path, checkpoint_every=1, progress=False) as run:
        before = build()
        train(before, adam(before))
        model = build()
        model, optimizer = run.setup(model, adam(model))
        for _ in run.epochs(1):
            for _ in run.steps(range(2)):
                train(model, optimizer)
        assert run.step == 2


def test_a_wrapper_that_loses_the_state_inside_is_found(tmp_path: Path) -> None:
    with paceline.init(checkpoint_dir=tmp_path, progress=False) as run:
        model = run.setup(build())
        optimizer = run.setup(Forgetful(adam(model)))
        with pytest.raises(RuntimeError, match="Adam has stepped"):
            for _ in run.steps(range(2)):
                train(model, optimizer)


def zero(folder: str) -> int:
    with paceline.init(checkpoint_dir=folder, progress=False) as run:
        model = run.setup(build())
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        run.register(optimizer=optimizer)
        for _ in run.steps(range(2)):
            run.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
        return run.step


def test_an_optimizer_that_ranks_divide_is_registered(tmp_path: Path) -> None:
    assert launch(zero, (str(tmp_path),), 2) == [2, 2]


def test_what_is_meant_to_be_lost_may_be(tmp_path: Path) -> None:
    """One without a state, one that is left out, and those of other runs, which have ended."""
    with paceline.init(checkpoint_dir=tmp_path, progress=False) as run:
        model = run.setup(build())
        optimizer = run.setup(adam(model))
        for _ in run.epochs(2):
            for _ in run.steps(range(2)):
                inner = build()
                train(inner, torch.optim.SGD(inner.parameters(), 0.1))
                train(model, optimizer)
            probe = build()
            probes = adam(probe)
            run.leave_out(probes)
            train(probe, probes)
            run.save()
        assert run.step == 4
    other = build()
    train(other, adam(other))
    with pytest.raises(Killed), paceline.init(checkpoint_dir=tmp_path, progress=False) as run:
        raise Killed
    train(other, adam(other))
    assert not _global_optimizer_post_hooks


# -- loops by hand -----------------------------------------------------------------------------------------------------


def own_update(run: paceline.Run, model: Any) -> Callable[[float], None]:
    """Nothing of it goes through the run."""
    run.register(model=model)

    def update(number: float) -> None:
        (model(torch.full((1, 2), float(number))) - 1).pow(2).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.001 * parameter.grad)
                parameter.grad = None

    return update


def said_update(run: paceline.Run, model: Any) -> Callable[[float], None]:
    update = own_update(run, model)

    def said(number: float) -> None:
        update(number)
        run.step_done()

    return said


def registered(run: paceline.Run, model: Any) -> Callable[[float], None]:
    optimizer = adam(model)
    run.register(model=model, optimizer=optimizer)
    return lambda number: train(model, optimizer, number)


def plain(run: paceline.Run, model: Any) -> Callable[[float], None]:
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    run.register(model=model)
    return lambda number: train(model, optimizer, number)


def over_steps(run: paceline.Run, used: list[int], update: Callable[[float], None]) -> Any:
    for number in run.steps(range(STEPS)):
        update(number)
        used.append(number)
        yield


def over_loader(run: paceline.Run, used: list[int], update: Callable[[float], None]) -> Any:
    loader = run.dataloader(TensorDataset(torch.arange(STEPS)), batch_size=1)
    for _ in run.epochs(1):
        for (x,) in loader:
            update(float(x))
            used.append(int(x))
            yield


def over_numbers(run: paceline.Run, used: list[int], update: Callable[[float], None]) -> Any:
    run.resume()
    for number in range(run.step, STEPS):
        update(number)
        used.append(number)
        yield


def resumed(folder: Path, how: Any, loop: Any, *, kill: bool) -> tuple[list[int], list[float]]:
    """The items that were used, and the weights; killed after a checkpoint and two more steps, and resumed."""
    used: list[int] = []
    for attempt in range(2 if kill else 1):
        model = build()
        try:
            with paceline.init(checkpoint_dir=folder, progress=False) as run:
                for done, _ in enumerate(loop(run, used, how(run, model)), start=1):
                    if done == SAVED and attempt == 0:
                        run.save(block=True)
                    if done == SAVED + 2 and kill and attempt == 0:
                        del used[SAVED:]
                        raise Killed
                assert run.step == STEPS
        except Killed:
            pass
    return used, [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


@pytest.mark.parametrize("loop", [over_steps, over_loader, over_numbers])
@pytest.mark.parametrize("how", [said_update, registered, plain])
def test_a_loop_by_hand_uses_every_batch_once(how: Any, loop: Any, tmp_path: Path) -> None:
    used, weights = resumed(tmp_path / "killed", how, loop, kill=True)
    assert used == list(range(STEPS))
    assert (used, weights) == resumed(tmp_path / "whole", how, loop, kill=False)


@pytest.mark.parametrize("loop", [over_steps, over_loader])
@pytest.mark.parametrize("first", [1, 3])
def test_a_loop_of_which_nothing_is_seen_is_told_at_its_first_save(loop: Any, first: int, tmp_path: Path) -> None:
    with paceline.init(checkpoint_dir=tmp_path, progress=False) as run:
        with pytest.raises(RuntimeError, match=r"run\.save: the loop calls neither .* call run\.step_done\(\)"):
            for done, _ in enumerate(loop(run, [], own_update(run, build())), start=1):
                if done == first:
                    run.save()
        assert not list(tmp_path.glob("step-*"))


def test_a_save_at_the_beginning_of_the_first_step_is_taken_at_its_end(tmp_path: Path) -> None:
    with paceline.init(checkpoint_dir=tmp_path, keep=9, progress=False) as run:
        model = run.setup(build())
        optimizer = run.setup(adam(model))
        for _ in run.steps(range(3)):
            run.save()
            train(model, optimizer)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000001", "step-000001-2", "step-000002"]


def test_a_loop_of_another_form_of_which_nothing_is_seen_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "paceline"), paceline.init(checkpoint_dir=tmp_path, progress=False) as run:
        update = own_update(run, build())
        for number in range(run.step, 3):
            update(number)
            run.save()
    assert [record.message for record in caplog.records] == [
        "run.save: no step was counted so far, so a resumed run begins at run.step 0; in a loop by hand, call "
        "run.step_done() after each step"
    ]


def test_gradients_for_a_registered_optimizer_are_not_lost(tmp_path: Path) -> None:
    """No checkpoint is taken between a backward and its step, nor within an accumulation by hand."""
    with paceline.init(checkpoint_dir=tmp_path, checkpoint_every=1, keep=9, progress=False) as run:
        model = run.setup(build())
        optimizer = adam(model)
        run.register(optimizer=optimizer)
        for number in run.steps(range(6)):
            run.backward(model(torch.ones(1, 2)).sum())
            if number == 0:
                with pytest.raises(RuntimeError, match=r"save after optimizer\.step\(\)"):
                    run.save()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000003", "step-000006"]
