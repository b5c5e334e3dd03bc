"""Mistakes that are noticed in the first steps, in one line each."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset  # noqa: E402

import paceline  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = pytest.mark.torch

SAME = "each rank trains on the same batches (test_first_steps.py:LINE), so the data is not divided among them; "
WHOLE = (
    "each rank takes its batches from the whole data set (test_first_steps.py:LINE), so the data is not divided among "
    "them; "
)
INSTEAD = "take the batches from run.dataloader(dataset, batch_size, shuffle=True)"
PLAIN = "the gradients of optimizer.step() at test_first_steps.py:LINE come from loss.backward(): "
UNEVEN = "all ranks count the same, also where some have smaller batches, as at the end of an epoch"
SUM = "they are the sum over 2 batches, and not the mean"
CALL = "; call run.backward(loss) instead"


def batches(run: paceline.Run, data: str) -> Iterable[Any]:
    dataset = TensorDataset(torch.arange(9.0)[:, None])
    if data == "ordered":
        return DataLoader(dataset, 2)
    if data == "shuffled":
        return DataLoader(dataset, 2, shuffle=True)
    if data == "steps":
        return run.steps(DataLoader(dataset, 2))
    if data == "divided":
        return DataLoader(dataset, 2, sampler=DistributedSampler(dataset, run.world_size, run.rank))
    if data == "own part":
        return DataLoader(Subset(dataset, range(run.rank, 8, run.world_size)), 2, shuffle=True)
    if data == "constant":
        return [(torch.ones(2, 1),)] * 5
    size = 9 if data == "uneven" else 8
    loader: Iterable[Any] = run.dataloader(TensorDataset(torch.arange(float(size))[:, None]), global_batch_size=2)
    return loader


def train(data: str, plain: bool, accumulate: int) -> list[str]:
    """The warnings of a training; `LINE` for the number of a line."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").handlers = [handler]
    with paceline.init(seed=0, progress=False) as run:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(accumulate=accumulate))
        lines = set()
        for _ in range(2):
            for (x,) in batches(run, data):
                lines.add(line := _line())
                loss = model(x).pow(2).mean()
                loss.backward() if plain else run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        if (watch := run._steps._watch) is not None:
            watch.meet()  # by now rank 0 has all that was sent
    (line,) = lines
    return [text.replace(f":{line + 1}", ":LINE").replace(f":{line + 3}", ":LINE") for text in told]


def _line() -> int:
    return sys._getframe(1).f_lineno


CASES = {  # data, whether loss.backward() is called, batches per step: what is told with one rank, and with two
    ("ordered", False, 1): ("", SAME + INSTEAD),
    ("ordered", True, 1): ("", SAME + INSTEAD),
    ("shuffled", True, 1): ("", WHOLE + INSTEAD),
    ("steps", False, 1): ("", SAME + INSTEAD),
    ("divided", True, 1): ("", ""),
    ("own part", False, 1): ("", ""),
    ("constant", True, 1): ("", ""),
    ("uneven", True, 1): ("", PLAIN + UNEVEN + CALL),
    ("uneven", False, 1): ("", ""),
    ("even", True, 1): ("", ""),
    ("even", True, 2): (PLAIN + SUM + CALL, PLAIN + SUM + CALL),
    ("even", False, 2): ("", ""),
}


def train_all() -> list[list[str]]:
    return [train(*case) for case in CASES]


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_mistake_is_told_once(ranks: int) -> None:
    first, *others = launch(train_all, (), ranks)
    expected = {case: [told[ranks - 1]] if told[ranks - 1] else [] for case, told in CASES.items()}
    assert dict(zip(CASES, first, strict=True)) == expected
    assert others == [[[]] * len(CASES)] * (ranks - 1)
