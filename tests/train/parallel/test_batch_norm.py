"""Statistics of batch norm, computed anew over all ranks."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402
from torch.optim import swa_utils  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import paceline  # noqa: E402

pytestmark = pytest.mark.torch
SIZE, BATCH = 21, 4  # the last batch has one sample: with two ranks, one of them has none


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Conv1d(1, 3, 2), torch.nn.BatchNorm1d(3), torch.nn.ReLU(), torch.nn.Flatten()
    return torch.nn.Sequential(*layers, torch.nn.Linear(9, 5), torch.nn.BatchNorm1d(5, affine=False))


def data() -> TensorDataset:
    x = torch.randn(SIZE, 1, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x.cumsum(0), torch.zeros(SIZE))


def statistics(model: torch.nn.Module) -> list[float]:
    return [value for name, buffer in model.named_buffers() for value in buffer.flatten().tolist()]


def updated(kind: str) -> tuple[list[float], list[bool], int, list[int]]:
    """Statistics, modes of the layers, steps done and how many batches the next epoch has."""
    with paceline.init(seed=0, progress=False) as run:
        model: Any = run.setup(build())
        model[1].eval()  # this mode is kept
        average = swa_utils.AveragedModel(model)
        train = run.dataloader(data(), global_batch_size=BATCH)
        evaluation = run.dataloader(data(), global_batch_size=BATCH, evaluation=True)
        loader = {"train": train, "evaluation": evaluation, "plain": DataLoader(data(), BATCH)}[kind]
        for refused in (train, evaluation):
            with pytest.raises(RuntimeError, match=r"call run\.update_bn\(loader, model\)"):
                swa_utils.update_bn(refused, build())
        for number, _ in enumerate(train):
            if number == 2:
                with pytest.raises(RuntimeError, match="call it after the loop"):
                    run.update_bn(train, average)
                run.step_done()
                break
            run.step_done()
        run.update_bn(loader, average)
        rest = [int(x.shape[0]) for x, _ in train]
        return statistics(average.module), [m.training for m in average.module], run.step, rest


@pytest.mark.parametrize(
    ("kind", "nproc"), [("train", 1), ("train", 2), ("evaluation", 1), ("evaluation", 2), ("plain", 1)]
)
def test_statistics_are_those_of_one_process(kind: str, nproc: int) -> None:
    model = build()
    # One sample has no variance in a layer without a length; torch refuses such a batch.
    model[-1] = torch.nn.Identity()
    swa_utils.update_bn(DataLoader(data(), BATCH), model)
    seen = launch(updated, (kind,), nproc)
    for values, modes, step, rest in seen:
        assert values == seen[0][0]
        assert values[:7] == pytest.approx(statistics(model))
        assert modes == [True, False, True, True, True, True]
        assert step == 3  # no step follows the batches of the last loop
        assert len(rest) == 3  # training goes on where it was


def evaluated(leaves: str) -> dict[str, list[float]]:
    """The statistics where this rank evaluates: within the loop, after it was left, and after `run.epochs`."""
    with paceline.init(seed=0, progress=False) as run:
        model: Any = build()
        model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 0.1))
        train = run.dataloader(data(), global_batch_size=BATCH, drop_last=True)
        one = run.dataloader(TensorDataset(torch.zeros(1, 1, 4)), global_batch_size=2, evaluation=True)
        seen = {}

        def evaluate(where: str) -> None:
            model.eval()
            with torch.no_grad():
                for (x,) in one:  # one rank has no batch
                    model(x)
            model.train()
            seen[where] = statistics(model)

        for _ in run.epochs(1):
            for number, (x, _) in enumerate(train):
                run.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if number == 1:
                    evaluate("within")
                if number == 2:
                    break
            if leaves == "evaluates":
                evaluate("behind")
        return seen | {"over": statistics(model)}


@pytest.mark.parametrize("leaves", ["evaluates", "ends"])
def test_ranks_evaluate_with_the_same_statistics_within_a_loop_and_after_a_break(leaves: str) -> None:
    first, second = launch(evaluated, (leaves,), 2)
    assert first == second
    assert len({*map(tuple, first.values())}) == 2, "each with those of the steps before"
