"""The library on GPUs: with nccl where there are enough, with ranks that share one, and with one process."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.train.parallel import test_around as around  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import paceline  # noqa: E402
from paceline.train.control.errors import ReplicaMismatch  # noqa: E402
from paceline.train.parallel.errors import WrongDevice  # noqa: E402

GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not GPUS, reason="this machine has no GPU"),
]
ranks = pytest.mark.parametrize(
    "nproc",
    [
        1,
        pytest.param(2, id="2-nccl", marks=pytest.mark.skipif(GPUS < 2, reason="nccl wants a GPU for each of 2 ranks")),
        pytest.param(GPUS + 1, id="shared"),
    ],
)


def data(size: int) -> Any:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(size, 3, generator=generator), torch.randn(size, 1, generator=generator))


def build(norm: bool) -> Any:
    torch.manual_seed(1)
    middle = torch.nn.BatchNorm1d(5) if norm else torch.nn.Tanh()
    return torch.nn.Sequential(torch.nn.Linear(3, 5), middle, torch.nn.Linear(5, 1))


def train(options: dict[str, Any], norm: bool = False) -> dict[str, Any]:
    with paceline.init(seed=0) as run:
        model = build(norm)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(**options))
        loader = run.dataloader(data(50), global_batch_size=8, shuffle=True)
        for _ in run.epochs(2):
            for x, y in loader:
                assert x.device == y.device == run.device
                run.backward((model(x) - y).pow(2).mean())
                run.clip_grad_norm(1.0)
                optimizer.step()
                optimizer.zero_grad()
        return {
            "device": str(run.device),
            "backend": torch.distributed.get_backend() if run.world_size > 1 else "",
            "weights": torch.cat([p.detach().flatten().cpu() for p in model.parameters()]).tolist(),
            "sum": run.all_reduce(torch.ones(1, device=run.device)).item(),
            "objects": run.gather_objects(run.rank),
        }


@ranks
def test_device_backend_and_gradients(nproc: int) -> None:
    (alone,) = paceline.launch(train, ({},))
    for rank, seen in enumerate(paceline.launch(train, ({},), nproc)):
        assert seen["device"] == f"cuda:{rank % GPUS}"
        if nproc > 1:
            assert ("nccl" in seen["backend"]) == (nproc <= GPUS)
        assert (seen["sum"], seen["objects"]) == (nproc, list(range(nproc)))
        assert seen["weights"] == pytest.approx(alone["weights"], abs=1e-5)


@ranks
def test_strategies(nproc: int) -> None:
    (alone,) = paceline.launch(train, ({"accumulate": 3},))
    for seen in paceline.launch(train, ({"accumulate": 3},), nproc):
        assert seen["weights"] == pytest.approx(alone["weights"], abs=1e-5)
    for seen in paceline.launch(train, ({"precision": "bf16", "compile": "eager"},), nproc):
        assert all(abs(weight) < 10 for weight in seen["weights"])


@pytest.mark.skipif(GPUS < 2, reason="batches of two ranks need two GPUs")
def test_batches_are_normalised_over_all_ranks() -> None:
    (alone,) = paceline.launch(train, ({}, True))
    for seen in paceline.launch(train, ({"sync_batchnorm": True}, True), nproc=2):
        assert seen["weights"] == pytest.approx(alone["weights"], abs=1e-3)


def exchange(sync: Any) -> tuple[str, list[float], int]:
    with paceline.init(seed=0) as run:
        model = build(False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(sync=sync))
        loader = run.dataloader(data(48), global_batch_size=8, shuffle=True)
        for _ in run.epochs(2):
            for x, y in loader:
                run.backward((model(x) - y).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
        weights = torch.cat([p.detach().flatten().cpu() for p in model.parameters()]).tolist()
        return str(run.device), weights, run.step


METHODS = [
    paceline.AllReduce(hierarchical=True),
    paceline.AllReduce(communicators=2),
    paceline.AllReduce(wire="fp16"),
    paceline.AllReduce(wire="bf16"),
    paceline.AllReduce(wire="int8"),
    paceline.PowerSGD(rank=2, warmup=2),
    paceline.TopK(fraction=0.5),
    paceline.LocalSGD(every=2, warmup=2),
    paceline.DiLoCo(every=4, fragments=2),
    "auto",
]


@pytest.mark.parametrize("sync", METHODS, ids=str)
@pytest.mark.skipif(GPUS < 2, reason="nccl wants a GPU for each of 2 ranks")
def test_methods_of_exchange(sync: Any) -> None:
    """All ranks end with one model, and it is near that of exact gradients where the method averages these."""
    ((_, expected, _),) = paceline.launch(exchange, (None,))
    seen = paceline.launch(exchange, (sync,), nproc=2)
    assert [device for device, _, _ in seen] == ["cuda:0", "cuda:1"]
    assert {steps for _, _, steps in seen} == {12}
    assert seen[0][1] == seen[1][1]
    assert seen[0][1] == pytest.approx(expected, abs=0.5)


def save_and_resume(folder: str, stop: int) -> tuple[int, list[float]]:
    with paceline.init(seed=0, checkpoint_dir=folder, checkpoint_every=2) as run:
        model = build(False)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        model, optimizer = run.setup(model, optimizer)
        loader = run.dataloader(data(50), global_batch_size=8, shuffle=True)
        for _ in run.epochs(2):
            for x, y in loader:
                run.backward((model(x) - y).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
                if run.step == stop:
                    break
            if run.step == stop:
                break
        return run.step, torch.cat([p.detach().flatten().cpu() for p in model.parameters()]).tolist()


@ranks
def test_a_resumed_training_ends_as_an_undisturbed_one(nproc: int, tmp_path: Any) -> None:
    undisturbed = paceline.launch(save_and_resume, (str(tmp_path / "a"), 0), nproc)
    paceline.launch(save_and_resume, (str(tmp_path / "b"), 6), nproc)
    for (steps, weights), (expected, whole) in zip(
        paceline.launch(save_and_resume, (str(tmp_path / "b"), 0), nproc), undisturbed, strict=True
    ):
        assert steps == expected == 14
        assert weights == pytest.approx(whole, abs=1e-5)


def batch_on_the_cpu() -> None:
    with paceline.init() as run:
        run.setup(build(False))(torch.ones(1, 3))


@ranks
def test_a_batch_on_the_wrong_device(nproc: int) -> None:
    with pytest.raises(WrongDevice, match=r"the model is on cuda:\d, but its argument of shape \[1, 3\] on cpu"):
        paceline.launch(batch_on_the_cpu, nproc=nproc)


@ranks
def test_what_goes_around_the_model_is_exchanged(nproc: int) -> None:
    (alone,) = paceline.launch(around.train_all)
    first, *others = paceline.launch(around.train_all, nproc=nproc)
    for name, weights in first.items():
        assert [each[name] for each in others] == [weights] * (nproc - 1), name
    for case in around.CASES:
        assert first[case.__name__] == pytest.approx(alone[case.__name__], abs=1e-4), case.__name__


def flip_a_bit(folder: str, of_state: bool) -> None:
    with paceline.init(seed=0, checkpoint_dir=folder, checkpoint_every=10) as run:
        model = build(False)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        model, optimizer = run.setup(model, optimizer)
        for step in run.steps(range(50)):
            run.backward(model(torch.ones(8, 3, device=run.device)).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            if step == 2 and run.rank == 1:
                weight = model[2].weight
                flipped = optimizer.state[weight]["exp_avg_sq"] if of_state else weight.detach()
                flipped.view(torch.int32)[0, 0] ^= 1 << 22


@pytest.mark.parametrize("of_state", [False, True])
def test_a_flipped_bit_of_memory_is_named(of_state: bool, tmp_path: Any) -> None:
    with pytest.raises(ReplicaMismatch, match=r"2\.weight"):
        paceline.launch(flip_a_bit, (str(tmp_path), of_state), GPUS + 1)


def scaled(nproc: int) -> list[float]:
    with paceline.init(seed=0) as run:
        model = build(False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = run.setup(model, optimizer)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**17, growth_interval=4)
        seen = []
        for _ in run.epochs(2):
            for x, y in run.dataloader(data(48), global_batch_size=8):
                with torch.autocast("cuda", torch.float16):
                    loss = (model(x) - y).pow(2).mean()
                run.backward(scaler.scale(loss))
                scaler.unscale_(optimizer)
                run.clip_grad_norm(1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                seen.append(float(run.mean(loss.detach().float())))
        return [*seen, float(scaler.get_scale())]


@ranks
def test_a_grad_scaler_steps_alike_on_all_ranks(nproc: int) -> None:
    results = paceline.launch(scaled, (nproc,), nproc)
    assert all(each == results[0] for each in results)
    assert results[0][11] < results[0][0]
