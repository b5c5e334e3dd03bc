"""What is sharded in checkpoints: DTensors are saved by all ranks, and what does not say its place is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from tests.train.launching import launch  # noqa: E402
from torch.distributed._shard import sharded_tensor  # noqa: E402
from torch.distributed._shard.sharding_spec import ChunkShardingSpec  # noqa: E402
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module  # noqa: E402

import paceline  # noqa: E402
from paceline.train.checkpoint.store import CheckpointError  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.torch


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


def buffered(mesh: Any) -> torch.nn.Module:
    module = plain()
    module.register_buffer("mean", distribute_tensor(torch.zeros(2), mesh, [Shard(0)]))
    return module


DTENSORS = "has DTensors, and is not sharded by fully_shard: pass it as it was before, "
FLAT = "is sharded in a way that run.setup does not support: "
MODULES: dict[str, tuple[Callable[[Any], torch.nn.Module], str, str]] = {
    "FSDP1": (
        lambda _: FullyShardedDataParallel(plain(), device_id=torch.device("cpu")),
        'parameter "_fsdp_wrapped_module._flat_param" is sharded by FullyShardedDataParallel',
        FLAT,
    ),
    "FSDP1's parameters": (
        lambda _: FullyShardedDataParallel(plain(), device_id=torch.device("cpu"), use_orig_params=True).module,
        'parameter "0.weight" is sharded by FullyShardedDataParallel',
        FLAT,
    ),
    "tensor parallel": (lambda mesh: parallelize_module(plain(), mesh, {"1": ColwiseParallel()}), "", DTENSORS),
    "replicated": (lambda mesh: distribute_module(plain(), mesh), "", DTENSORS),
    "a buffer": (buffered, "", DTENSORS),
}


@pytest.mark.parametrize("kind", MODULES)
def test_models_that_run_setup_cannot_train_are_refused(kind: str, tmp_path: Path) -> None:
    alone(refuses_object, kind, tmp_path)


def refuses_object(mesh: Any, kind: str, folder: Path) -> None:
    make, found, why = MODULES[kind]
    model = make(mesh)
    with paceline.init(checkpoint_dir=folder, device="cpu") as run:
        with pytest.raises(TypeError) as caught:
            run.setup(model)
        assert why in str(caught.value)
        assert "\n" not in str(caught.value)
        if not found:
            run.register(net=model)
            run.save(block=True)
            return
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
