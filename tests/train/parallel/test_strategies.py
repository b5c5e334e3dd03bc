"""A strategy belongs to what was set up with it; each rank may have a state of its own in a checkpoint."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import paceline  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch
SIZE, BATCH, EPOCHS = 26, 4, 2


def build(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def data() -> Any:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(SIZE, 3, generator=generator), torch.randn(SIZE, 1, generator=generator))


def values(model: Any) -> list[float]:
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def by_hand(seed: int, accumulate: int) -> list[float]:
    model = build(seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = data().tensors
    for _ in range(EPOCHS):
        for first in range(0, SIZE, BATCH * accumulate):
            window = slice(first, first + BATCH * accumulate)
            (model(x[window]) - y[window]).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


def two_strategies(first: int, second: int) -> tuple[list[float], list[float], list[tuple[bool, bool]]]:
    """Two models with an optimizer each, which accumulate different numbers of batches; a loss of each per batch."""
    with paceline.init() as run:
        one, two = build(1), build(2)
        slow, fast = torch.optim.SGD(one.parameters(), 0.1), torch.optim.SGD(two.parameters(), 0.1)
        one, slow = run.setup(one, slow, strategy=paceline.Strategy(accumulate=first))
        two = run.setup(two, strategy=paceline.Strategy(accumulate=second))
        fast = run.setup(fast)  # its strategy is that of its model
        accumulating = []
        for _ in run.epochs(EPOCHS):
            for x, y in run_data(run):
                run.backward((one(x) - y).pow(2).mean())
                is_first = run.accumulating
                slow.step()
                slow.zero_grad()
                run.backward((two(x) - y).pow(2).mean())
                accumulating.append((is_first, run.accumulating))
                fast.step()
                fast.zero_grad()
        return values(one), values(two), accumulating


@functools.lru_cache(maxsize=1)
def run_data(run: Any) -> Any:
    return run.dataloader(data(), global_batch_size=BATCH)


@pytest.mark.parametrize(("nproc", "first", "second"), [(1, 4, 1), (2, 1, 4), (2, 2, 3)])
def test_a_second_setup_does_not_change_the_strategy_of_the_first(nproc: int, first: int, second: int) -> None:
    for one, two, accumulating in launch(two_strategies, (first, second), nproc):
        assert one == pytest.approx(by_hand(1, first), abs=1e-6)
        assert two == pytest.approx(by_hand(2, second), abs=1e-6)
        steps = -(-SIZE // BATCH)
        assert accumulating == EPOCHS * [
            ((n % first != 0) and n < steps, (n % second != 0) and n < steps) for n in range(1, steps + 1)
        ]


def test_a_loss_of_models_that_accumulate_differently_is_refused() -> None:
    with paceline.init() as run:
        one = run.setup(build(1), strategy=paceline.Strategy(accumulate=2))
        two = run.setup(build(2))
        x = torch.zeros(1, 3)
        with pytest.raises(RuntimeError, match=r"models set up with different Strategy\.accumulate"):
            run.backward((one(x) + two(x)).sum())
        loss = run.setup(torch.nn.Linear(3, 1)).weight.sum()
        run.backward(one(x).sum())
        with pytest.raises(RuntimeError, match="computed with no model that was set up"):
            run.backward(loss)


def test_an_optimizer_accumulates_as_its_model() -> None:
    with paceline.init() as run:
        model = run.setup(build(1), strategy=paceline.Strategy(accumulate=2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(ValueError, match=r"SGD is set up with accumulate=1, and the model .* accumulate=2"):
            run.setup(optimizer, strategy=paceline.Strategy())
        run.setup(optimizer, strategy=paceline.Strategy(accumulate=2, lr_scaling="linear"))


class Residual:
    """What a rank has for itself alone."""

    def __init__(self, value: float) -> None:
        self.value = torch.tensor(value)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def saved_on_rank(folder: Path) -> None:
    with paceline.init(checkpoint_dir=folder) as run:
        run.setup(build(1))
        run._prepared.register_on_rank("residual", Residual(float(run.rank + 10)))
        run.save(block=True)


def loaded_on_rank(folder: Path) -> tuple[bool, float]:
    with paceline.init(checkpoint_dir=folder) as run:
        run.setup(build(1))
        residual = Residual(0.0)
        run._prepared.register_on_rank("residual", residual)
        with pytest.raises(ValueError, match="residual is taken"):
            run._prepared.register_on_rank("residual", residual)
        return run.resume(), residual.value.item()


def test_each_rank_has_a_state_of_its_own_in_a_checkpoint(tmp_path: Path) -> None:
    launch(saved_on_rank, (tmp_path,), 2)
    assert launch(loaded_on_rank, (tmp_path,), 2) == [(True, 10.0), (True, 11.0)]
    assert loaded_on_rank(tmp_path) == (True, 0.0), "another number of ranks"


class Best:
    """As a scheduler that notes a metric of NumPy's."""

    def __init__(self, value: Any) -> None:
        self.state = {"best": value, "history": [value, (1, value)]}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_numbers_of_numpy_are_saved_as_pythons(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    with paceline.init(checkpoint_dir=tmp_path) as run:
        run.register(best=Best(numpy.float32(0.5)))
        run.save(block=True)
    with paceline.init(checkpoint_dir=tmp_path) as run:
        best = Best(0.0)
        run.register(best=best)
        assert run.resume()
    assert best.state == {"best": 0.5, "history": [0.5, (1, 0.5)]}
    assert type(best.state["best"]) is float


def test_a_run_shows_what_a_script_needs_and_nothing_else() -> None:
    with paceline.init() as run:
        names = {name for name in dir(run) if not name.startswith("_")}
    assert names == {
        "accumulating", "all_gather", "all_reduce", "attempt", "backward", "barrier", "broadcast", "broadcast_object",
        "build", "clip_grad_norm", "close", "dataloader", "device", "epochs", "gather_objects", "is_main",
        "leave_out", "local_rank", "log", "mean", "pipeline_step", "print", "rank", "register", "resume", "save",
        "setup", "state",
        "step", "step_done", "steps", "unwrap", "update_bn", "world_size",
    }  # fmt: skip


def test_the_environment_says_what_a_script_leaves_out() -> None:
    env = {"PACELINE_PRECISION": "bf16", "PACELINE_BUCKET_MB": "4"}
    assert paceline.Strategy().completed(env) == paceline.Strategy(precision="bf16", bucket_mb=4, sync="allreduce")
    assert paceline.Strategy(bucket_mb=25, sync="fp16").completed(env) == paceline.Strategy(
        precision="bf16", bucket_mb=25, sync="fp16"
    )
    with pytest.raises(ValueError, match="PACELINE_PRECISION='fp8' is no value for precision"):
        paceline.Strategy().completed({"PACELINE_PRECISION": "fp8"})
