"""What is sharded in checkpoints: DTensors are saved by all ranks, and what does not say its place is refused."""

from __future__ import annotations

import contextlib
import inspect
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from tests.train.launching import launch  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed._shard import sharded_tensor  # noqa: E402
from torch.distributed._shard.sharding_spec import ChunkShardingSpec  # noqa: E402
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import paceline  # noqa: E402
from paceline.train.checkpoint import import_weights  # noqa: E402
from paceline.train.checkpoint.store import CheckpointError  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.torch
SHARDS = "ignored_params" in inspect.signature(fully_shard).parameters
needs_sharding = pytest.mark.skipif(not SHARDS, reason="this torch shards no models on the CPU")


def plain() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))


def fsdp() -> torch.nn.Module:
    return fully_shard(plain())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Any]:
    """Train by hand; returns the whole weights."""
    for step in steps:
        model(torch.full((2, 4), float(step + 1))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().flatten().tolist() for p in model.parameters()]  # type: ignore[operator]


def alone(check: Callable[..., None], *args: Any) -> None:
    """Call `check` with a mesh of one rank, and `args`, in a process of its own: this one forks others later."""
    launch(_alone, (check, *args))


def _alone(check: Callable[..., None], *args: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    check(dist.init_device_mesh("cpu", (1,)), *args)


class Nested:
    """An object with a state of its own."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


FLAT = "is sharded in a way that run.setup does not support: "
MODULES: dict[str, tuple[Callable[[Any], torch.nn.Module], str]] = {
    "FSDP1": (
        lambda _: FullyShardedDataParallel(plain(), device_id=torch.device("cpu")),
        'parameter "_fsdp_wrapped_module._flat_param" is sharded by FullyShardedDataParallel',
    ),
    "FSDP1's parameters": (
        lambda _: FullyShardedDataParallel(plain(), device_id=torch.device("cpu"), use_orig_params=True).module,
        'parameter "0.weight" is sharded by FullyShardedDataParallel',
    ),
}


@pytest.mark.parametrize("kind", MODULES)
def test_models_that_run_setup_cannot_train_are_refused(kind: str, tmp_path: Path) -> None:
    alone(refuses_object, kind, tmp_path)


def refuses_object(mesh: Any, kind: str, folder: Path) -> None:
    make, found = MODULES[kind]
    model = make(mesh)
    with paceline.init(checkpoint_dir=folder, device="cpu") as run:
        with pytest.raises(TypeError) as caught:
            run.setup(model)
        assert FLAT in str(caught.value)
        assert "\n" not in str(caught.value)
        with pytest.raises(TypeError) as caught:
            run.register(net=model)
        assert str(caught.value).startswith(f'"net": {found}: each rank has a part of it, and it does not say which; ')
        assert "or pass per_rank=True" in str(caught.value)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(TypeError, match=r'^"sgd": parameter "\d" of group 0 is sharded'):
            run.register(sgd=optimizer)
        with pytest.raises(TypeError, match=r"the SGD has parameters that are sharded in a way that run\.setup does"):
            run.setup(optimizer)
        named = torch.optim.SGD(model.named_parameters(), lr=0.1)
        with pytest.raises(TypeError, match=r'"sgd": parameter "[a-z0-9._]+" is sharded'):
            run.register(sgd=named)
        run.register(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))  # its state has no tensors of the model
        run.save(block=True)


def test_a_state_with_a_sharded_tensor_is_refused_at_the_save(tmp_path: Path) -> None:
    alone(refuses_state, tmp_path)


def refuses_state(mesh: Any, folder: Path) -> None:
    whole = torch.zeros(2)
    parts = sharded_tensor.zeros(ChunkShardingSpec(0, ["rank:0/cpu"]), 2, 2)
    refused = {
        "own['all'][1][0] is a ShardedTensor": {"all": [whole, (parts,)]},
        "own is a ShardedTensor": parts,
        "own: w.0 is on the meta device, and so has no numbers": {"w": [torch.empty(2, device="meta")]},
    }
    with paceline.init(checkpoint_dir=folder / "run") as run:
        own = Nested(whole)
        run.register(own=own)
        for where, state in refused.items():
            own.state = state
            with pytest.raises(CheckpointError) as caught:
                run.save(block=True)
            assert where in str(caught.value)
            assert not list(folder.glob("run/*step-*"))
        own.state = {"all": [distribute_tensor(whole + 1, mesh, [Replicate()]), (whole,)]}
        run.save(block=True)
        own.state = {"all": [distribute_tensor(whole, mesh, [Shard(0)]), (whole,)]}
        run.resume()
        assert torch.equal(own.state["all"][0].full_tensor(), whole + 1)


def test_numbers_that_are_sharded_are_refused() -> None:
    alone(refuses_numbers)


def refuses_numbers(mesh: Any) -> None:
    number = distribute_tensor(torch.tensor(1.0), mesh, [Replicate()])
    with paceline.init() as run:
        with pytest.raises(ValueError, match=r"loss is a DTensor; log its value, loss\.full_tensor\(\)"):
            run.log(loss=number)
        for total, count in ((number, 1), (1, number)):
            with pytest.raises(TypeError, match=r"run\.mean takes this rank's own numbers, not a DTensor"):
                run.mean(total, count)


def registered_before(folder: Path, kind: str) -> list[str]:
    """Shard what was registered, on all ranks or on rank 1 alone; returns the errors of two saves."""
    model, average, errors = plain(), torch.zeros(1), []
    with paceline.init(checkpoint_dir=folder, device="cpu") as run:
        other = Nested({"average": average})
        run.register(other=other, net=model)
        run.save(block=True)
        other.state = {"average": average + 1}
        if kind == "FSDP1":
            FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        elif run.rank == 1:
            model.register_buffer("part", distribute_tensor(torch.zeros(2), mesh_of_this_rank(), [Replicate()]))
        else:
            model.register_buffer("part", torch.zeros(2))
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                run.save(block=True)
            errors.append(str(caught.value))
        run.barrier()
    return errors


def mesh_of_this_rank() -> Any:
    group = [dist.new_group([rank]) if dist.get_rank() == rank else None for rank in range(dist.get_world_size())]
    return DeviceMesh.from_group(group[dist.get_rank()], "cpu")


@pytest.mark.parametrize("kind", ["FSDP1", "one rank"])
def test_what_becomes_sharded_after_it_was_registered_is_refused(kind: str, tmp_path: Path) -> None:
    """On all ranks in the same words, without saving anything, and without waiting for a rank."""
    first, second = launch(registered_before, (tmp_path, kind), 2)
    assert first == second
    why = {
        "FSDP1": '"net": parameter "0.weight" is sharded by FullyShardedDataParallel: each rank has a part of it, ',
        "one rank": f"cannot save step 0 in {tmp_path}: other tensors are sharded on rank 1 than on rank 0; ",
    }[kind]
    assert all(why in save for save in first)
    (saved,) = tmp_path.glob("*step-*")
    loaded = torch.load(saved / "net.pt", weights_only=True)
    assert torch.equal(loaded["0.weight"], plain()[0].weight)


class Whole:
    """An object with whole tensors."""

    options = StateDictOptions(full_state_dict=True)

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self.options,
        )


def saved_whole(folder: Path, steps: range) -> list[Any]:
    with paceline.init(checkpoint_dir=folder, device="cpu") as run:
        model = fsdp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        run.register(training=Whole(model, optimizer))
        assert run.resume() == (steps.start > 0)
        weights = train(model, optimizer, steps)
        run.save(block=True)
        return weights


@needs_sharding
def test_an_object_with_whole_tensors_goes_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    (whole,) = launch(saved_whole, (tmp_path / "whole", range(4)))
    for nproc, step in ((2, 0), (3, 1), (1, 2), (2, 3)):
        seen = launch(saved_whole, (tmp_path / "parts", range(step, step + 1)), nproc)
    torch.testing.assert_close(seen, [whole] * 2)


def saved_by_each_rank(folder: Path, steps: range) -> Any:
    with paceline.init(checkpoint_dir=folder, device="cpu") as run:
        model = fsdp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        state = run.state(weight=model[0].weight.detach().clone())
        run.register(per_rank=True, net=model, adam=optimizer)
        try:
            assert run.resume() == (steps.start > 0)
        except RuntimeError as error:
            return str(error)
        assert state.weight.full_tensor().shape == (4, 4)
        weights = train(model, optimizer, steps)
        run.save(block=True)
        return weights


@needs_sharding
def test_each_rank_saves_a_sharded_model_for_itself(tmp_path: Path) -> None:
    whole = launch(saved_by_each_rank, (tmp_path / "whole", range(4)), 2)
    launch(saved_by_each_rank, (tmp_path / "parts", range(2)), 2)
    assert launch(saved_by_each_rank, (tmp_path / "parts", range(2, 4)), 2) == whole
    (error,) = launch(saved_by_each_rank, (tmp_path / "parts", range(4, 5)))
    assert error.startswith("run.state: weight is a DTensor, of which each of the 2 ranks has saved its part;")


def test_sharding_is_not_imported_to_look_for_it(tmp_path: Path) -> None:
    script = """
import sys, torch, paceline
with paceline.init(checkpoint_dir=sys.argv[1], device="cpu") as run:
    run.register(net=torch.nn.Linear(2, 2))
    run.log(loss=run.mean(1, 1))
    run.save(block=True)
    run.resume()
print([name for name in ("torch.distributed.tensor", "torch.distributed._shard.sharded_tensor") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# -- weights that were imported ----------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A model with tied weights, blocks, a buffer and an extra state; its parameters are large enough for run.build."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(40, 40, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(40, 40) for _ in range(2))
        self.head = nn.Linear(40, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.zeros(40))
        self.note = "fresh"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x + self.shift)  # type: ignore[no-any-return]

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def weights() -> dict[str, Any]:
    """As a file has them: without one name of the tied weights."""
    torch.manual_seed(7)
    model = Tied()
    model.note, model.shift = "kept", torch.ones(40)
    state = dict(model.state_dict())
    del state["head.weight"]
    return state


def imports(folder: Path, state: dict[str, Any], force: str = "") -> None:
    """Import weights, within a process that trains afterwards."""
    file = folder.with_name(f"{folder.name}.pt")
    torch.save(state, file)
    with (
        mock.patch.object(sys, "argv", ["", str(folder), force, str(file)]),
        mock.patch("signal.signal"),
        pytest.raises(SystemExit) as ended,
    ):
        import_weights.main()
    assert ended.value.code == 0


def whole(state: Any) -> dict[str, Any]:
    """The tensors of a state, whole; a collective of all ranks."""
    tensors = {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}
    full = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in tensors.items()}
    return {name: each.clone() for name, each in full.items()}


def trained(folder: Path, shard: Any, builds: bool) -> Any:
    """Train two epochs of two batches.

    Returns what the model has behind `run.setup` and, if that is the first pass, in it; the steps; and the last state.
    """
    with paceline.init(seed=1, checkpoint_dir=folder, checkpoint_every=1, progress=False, device="cpu") as run:
        with run.build() if builds else contextlib.nullcontext():
            model, other = Tied(), nn.Linear(40, 40)
        options = {"units": ("blocks.0", "blocks.1")} if shard not in (False, "optimizer") else {}
        net = model
        model, optimizer = run.setup(
            model, torch.optim.SGD(model.parameters(), 0.1), strategy=paceline.Strategy(shard=shard, **options)
        )
        run.setup(other)
        before = whole(net.state_dict()) if shard != "auto" else {}
        data = run.dataloader(TensorDataset(torch.ones(4, 40)), global_batch_size=2)
        steps = []
        for _ in run.epochs(2):
            for (x,) in data:
                loss = model(x).square().mean()
                before = before or whole(net.state_dict())
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                steps.append(run.step)
        return before, steps, whole(net.state_dict()), net.note


@pytest.mark.parametrize("builds", [False, True])
@pytest.mark.parametrize(
    ("shard", "nproc"),
    [
        (False, 1),
        (False, 2),
        pytest.param(True, 2, marks=needs_sharding),
        ("optimizer", 2),
        ("auto", 2),
        ("auto", 1),
    ],
)
def test_training_begins_with_weights_that_were_imported(
    shard: Any, nproc: int, builds: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = weights()
    launch(imports, (tmp_path / "saved", given))
    for before, steps, after, note in launch(trained, (tmp_path / "saved", shard, builds), nproc):
        torch.testing.assert_close(before.pop("head.weight"), given["embedding.weight"], rtol=0, atol=0)
        torch.testing.assert_close(before, {n: e for n, e in given.items() if n != "_extra_state"}, rtol=0, atol=0)
        assert (steps, note) == ([1, 2, 3, 4], "kept")
        assert not torch.equal(after["embedding.weight"], given["embedding.weight"])
    assert capfd.readouterr().err.count(f"paceline: starting with the weights of {tmp_path}/saved/step-000000\n") == 1
    saved = sorted(path.name for path in (tmp_path / "saved").glob("step-*"))
    assert saved == ["step-000002", "step-000003", "step-000004"]  # keep=3
    (_, steps, *_), *_ = launch(trained, (tmp_path / "saved", shard, builds), nproc)
    assert steps == []
    assert "the weights of" not in capfd.readouterr().err


def begins(folder: Path, saves: bool) -> tuple[list[float], bool, float]:
    """Train by hand with one rank; the average is made behind `run.setup`."""
    with paceline.init(checkpoint_dir=folder, device="cpu") as run:
        run.setup(net := plain())
        average = net[0].weight.detach().clone()
        resumed = run.resume()
        run.step_done()
        if saves:
            run.save(block=True)
        return [float(average.sum()), float(net[0].weight.sum())], resumed, run.step


def test_until_a_run_has_saved_it_begins_with_the_weights_again(tmp_path: Path) -> None:
    state = {name: torch.full_like(each, 2.0) for name, each in plain().state_dict().items()}
    launch(imports, (tmp_path, state))
    for saves in (False, True):
        assert launch(begins, (tmp_path, saves)) == [([32.0, 32.0], False, 1)]
    assert launch(begins, (tmp_path, False))[0][1:] == (True, 2)
    launch(imports, (tmp_path, {name: each + 1 for name, each in state.items()}, "force"))
    assert launch(begins, (tmp_path, False)) == [([48.0, 48.0], False, 1)]


def begins_registered(folder: Path) -> tuple[float, bool]:
    with paceline.init(checkpoint_dir=folder, device="cpu") as run:
        run.register(model=(model := plain()))
        return float(model[0].weight.sum()), run.resume() or bool(model[0].weight.sum() == 32.0)


def test_a_registered_model_gets_the_weights_where_a_run_would_resume(tmp_path: Path) -> None:
    state = {name: torch.full_like(each, 2.0) for name, each in plain().state_dict().items()}
    launch(imports, (tmp_path, state))
    ((before, gets),) = launch(begins_registered, (tmp_path,))
    assert (before != 32.0, gets) == (True, True)


def refused(folder: Path, shard: bool) -> str:
    with paceline.init(checkpoint_dir=folder, device="cpu") as run:
        with pytest.raises(RuntimeError) as caught:
            run.setup(
                Tied(), strategy=paceline.Strategy(shard=shard, units=("blocks.0", "blocks.1") if shard else None)
            )
        return str(caught.value)


@pytest.mark.parametrize("shard", [False, pytest.param(True, marks=needs_sharding)])
def test_weights_that_do_not_fit_are_refused_on_all_ranks(shard: bool, tmp_path: Path) -> None:
    state = weights()
    del state["blocks.0.bias"], state["shift"]
    extra = {f"other.{number}": torch.zeros(1) for number in range(5)}
    launch(imports, (tmp_path / "saved", {**state, **extra, "blocks.1.bias": torch.zeros(3)}))
    line = (
        f"the weights of {tmp_path}/saved/step-000000 do not fit the model: they lack shift, blocks.0.bias; the model "
        "lacks other.0, other.1, other.2 and 2 more; other shapes: blocks.1.bias, which is [3] there and [40] in the "
        "model; import weights of this model, or use another checkpoint_dir"
    )
    assert launch(refused, (tmp_path / "saved", shard), 2) == [line] * 2


@pytest.mark.parametrize("cut", [False, True])
def test_weights_that_are_damaged_are_not_used(cut: bool, tmp_path: Path) -> None:
    launch(imports, (tmp_path / "saved", weights()))
    file = tmp_path / "saved" / "step-000000" / "model.pt"
    size = file.stat().st_size
    os.truncate(file, size - 100)
    if not cut:
        os.truncate(file, size)
    ((kind, line),) = launch(damaged, (tmp_path / "saved",))
    assert kind == "CheckpointError"
    why = f"the only checkpoint in {tmp_path}/saved is damaged; move the folder away to start from the beginning"
    assert line == f"cannot resume: {why}"


def damaged(folder: Path) -> tuple[str, str]:
    with paceline.init(checkpoint_dir=folder, device="cpu") as run:
        with pytest.raises(RuntimeError) as caught:
            run.setup(Tied())
            list(run.epochs(1))
        return type(caught.value).__name__, str(caught.value)
