"""Every optimizer goes on from a checkpoint as if it had not been interrupted."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402

import paceline  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.torch


class Momentum(torch.optim.Optimizer):
    """As a user writes one: it calls `Optimizer.__init__`, and has options that are NumPy's numbers."""

    def __init__(self, parameters: Any, lr: Any, decay: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.mul_(group["decay"]).add_(parameter.grad)
                parameter.sub_(mean, alpha=0.05 if group["lr"] is None else float(group["lr"]))


def own(parameters: Any) -> Any:
    numpy = pytest.importorskip("numpy")
    return Momentum(parameters, lr=numpy.float64(0.05))


def of_package(package: str, name: str) -> Callable[..., Any]:
    return lambda parameters: getattr(pytest.importorskip(package), name)(parameters, lr=0.01)


OF_TORCH = {
    name: lambda parameters, kind=kind: kind(parameters, lr=0.01)
    for name, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
OF_OTHERS = {
    "Lion": of_package("lion_pytorch", "Lion"),
    "AdamWScheduleFree": of_package("schedulefree", "AdamWScheduleFree"),
    "Prodigy": of_package("prodigyopt", "Prodigy"),
    "a user's own": own,
    "one without a learning rate": lambda parameters: Momentum(parameters, lr=None),
}


def train(model: Any, optimizer: Any, run: Any, steps: range) -> None:
    """Steps that all optimizers can take: with a closure, and gradients that are sparse for the one that needs it."""
    sparse = isinstance(optimizer, torch.optim.SparseAdam)
    if hasattr(optimizer, "train"):
        optimizer.train()
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))

        def closure(x: Any = x) -> Any:
            optimizer.zero_grad()
            loss = (model.weight @ x.T).pow(2).mean()
            run.backward(loss)
            if sparse:
                model.weight.grad = model.weight.grad.to_sparse(1)
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


@pytest.mark.parametrize("name", [*OF_TORCH, *OF_OTHERS])
def test_an_optimizer_goes_on_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    seen = []
    for folder, parts in (("whole", [range(6)]), ("parts", [range(3), range(3, 6)])):
        for steps in parts:
            torch.manual_seed(1)
            model = torch.nn.Linear(4, 3, bias=False)  # a matrix, which some insist on
            optimizer = {**OF_TORCH, **OF_OTHERS}[name](model.parameters())
            with paceline.init(checkpoint_dir=tmp_path / folder) as run:
                model, optimizer = run.setup(model, optimizer)
                assert run.resume() == (steps.start > 0)
                train(model, optimizer, run, steps)
                run.save(block=True)
        seen.append((model.state_dict(), optimizer.state_dict()))
    torch.testing.assert_close(seen[0], seen[1], rtol=0, atol=0)


def test_a_checkpoint_of_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    """Options that the script gives a group by itself are no part of that."""
    for kind in ("SGD", "Adam", "SGD"):
        model = torch.nn.Linear(2, 2)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
        with paceline.init(checkpoint_dir=tmp_path) as run:
            run.setup(model, optimizer)
            if kind == "Adam":
                with pytest.raises(RuntimeError, match=r"optimizer does not fit Adam: it has no .*betas.*eps"):
                    run.resume()
            else:
                optimizer.param_groups[0][f"group of {run.resume()}"] = True
                run.resume()
                run.save(block=True)


def phase(folder: Path) -> int:
    with paceline.init(checkpoint_dir=folder) as run:
        run.setup(torch.nn.Linear(2, 2))
        for _ in run.epochs(1):
            for _ in run.dataloader([0.0], batch_size=1):
                pass
        run.save(block=True)
        return run.step


def test_a_later_run_of_a_script_begins_though_an_earlier_one_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path))
    assert launch(phase, (tmp_path / "pretrained",), 1) == [1]
    assert launch(phase, (tmp_path / "tuned",), 1) == [1]
    (tmp_path / "pretrained").rename(tmp_path / "lost")
    (tmp_path / "tuned").rename(tmp_path / "lost too")
    with pytest.raises(RuntimeError, match="this job has saved step 1, and there is no checkpoint in"):
        launch(phase, (tmp_path / "another",), 1)
