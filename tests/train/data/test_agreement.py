"""Ranks split data alike, and are refused where they have not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402
from torch.utils.data import (  # noqa: E402
    ConcatDataset,
    Dataset,
    StackDataset,
    SubsetRandomSampler,
    TensorDataset,
    random_split,
)

import paceline  # noqa: E402
from paceline.train.data.agreement import Description  # noqa: E402
from paceline.train.data.make_loader import make_loader  # noqa: E402

pytestmark = pytest.mark.torch


def draws() -> list[float]:
    return [random.random(), np.random.rand(), torch.rand(()).item()]


def split_and_train() -> dict[str, Any]:
    run = paceline.init(seed=5)
    own = random_split(range(80), [64, 16])
    permutation, order = np.random.permutation(80).tolist(), random.sample(range(80), 80)
    alike = run.gather_objects((list(own[0]), permutation, order, draws()))
    train = run.dataloader(own[0], 8, shuffle=True)
    validation = run.dataloader(own[1], batch_size=8, evaluation=True)
    apart = run.gather_objects(draws())
    model = run.setup(torch.nn.Linear(1, 1))
    used = []
    for batch in train:
        used += run.all_gather(batch[: train.samples])
        run.backward(model(batch[:, None].float()).mean())
    evaluated = [x for batch in validation for x in batch.tolist()]
    everything = torch.cat(used).tolist() + [x for rank in run.gather_objects(evaluated) for x in rank]
    run.close()
    return {"alike": alike, "apart": apart, "used": everything, "after": draws()}


def test_ranks_draw_alike_until_the_first_loader_and_apart_from_then_on() -> None:
    one, two = launch(split_and_train, nproc=2)
    assert one["alike"][0] == one["alike"][1]
    assert all(a != b for a, b in zip(*one["apart"], strict=True))
    assert sorted(one["used"]) == list(range(80))
    assert all(a != b for a, b in zip(one["after"], two["after"], strict=True))
    alone = split_and_train()
    assert alone["alike"][0] == one["alike"][0], "as in one process"
    assert alone["apart"][0] == one["apart"][0]


def refused(folder: str) -> list[str]:
    """What is said of data that differs, in the words of this rank."""
    run = paceline.init(seed=5)
    model = run.setup(torch.nn.Linear(1, 1))
    rank = run.rank
    x = torch.arange(80.0)[:, None]
    options: dict[str, Any] = {"batch_size": 8}
    same = TensorDataset(x + rank * 1e-7, torch.arange(80))
    cases: list[tuple[Any, dict[str, Any]]] = [
        (random_split(same, [64, 16])[0], options),
        (TensorDataset(x[: 80 - rank]), options),
        (TensorDataset(x.flip(0) if rank else x), options),
        (same, {"batch_size": 8 + rank}),
        (same, {"global_batch_size": 8, "sampler": SubsetRandomSampler(torch.randperm(80)[:40].tolist())}),
        (same, {**options, "weights": torch.rand(80)}),
        (random_split(same, [64, 16])[0], {**options, "evaluation": True}),
    ]
    for number, (dataset, chosen) in enumerate(cases):
        loader = run.dataloader(dataset, **chosen)
        if "evaluation" in chosen:  # it is compared with the next loader that trains
            loader = run.dataloader(same, **options)
        with pytest.raises(paceline.DataMismatch) as caught:
            next(iter(loader))
        Path(folder, f"{number}-{rank}").write_text(str(caught.value))
    if run.is_main:  # some ranks alone may evaluate
        assert len(next(iter(run.dataloader(same, 4, evaluation=True)))[0]) == 4
    for features, _ in run.dataloader(same, 8):
        run.backward(model(features).mean())
    watch = run._steps._watch
    assert watch is not None
    Path(folder, f"entered-{rank}").write_text(str(watch._count))
    run.close()
    return [Path(folder, f"{number}-{rank}").read_text() for number in range(len(cases))]


def test_data_that_differs_is_refused_at_the_first_batch(tmp_path: Path) -> None:
    one, two = launch(refused, (str(tmp_path),), nproc=2)
    assert one == two, "all ranks say the same"
    entered = {(tmp_path / f"entered-{rank}").read_text() for rank in range(2)}
    assert len(entered) == 1, "who evaluates alone enters no collective, by which a rank that leaves early is found"
    for message, what in zip(
        one,
        [
            "rank 0 has Subset of TensorDataset, 64 samples, rank 1 has other data set.indices",
            "rank 0 has TensorDataset, 80 samples, rank 1 has TensorDataset, 79 samples",
            "rank 1 has other data set.tensors[0]",
            "rank 1 has global batch size 18 and not 16",
            "rank 1 has other sampler.indices",
            "rank 1 has other weights",
            "rank 1 has other data set.indices",
        ],
        strict=True,
    ):
        assert what in message
        assert "a run.dataloader (test_agreement.py:" in message
        assert "before run.setup" in message
        assert "\n" not in message


class Frame:
    """A table as pandas has them: rows are chosen by position, and the labels of rows are others."""

    def __init__(self, rows: list[list[Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def iloc(self) -> Any:
        return self

    def __getitem__(self, chosen: slice) -> Frame:
        return Frame(self.rows[chosen])

    def to_numpy(self) -> Any:
        return np.array(self.rows, dtype=object)


class Held(Dataset[Any]):
    """Samples that are held in any form."""

    def __init__(self, data: Any, size: int = 2) -> None:
        self.data = data
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> str:
        raise AssertionError("nothing is read")


class Files(Dataset[str]):
    """Something with a list, and attributes that may differ."""

    def __init__(self, names: list[str], rank: int = 0) -> None:
        self.names = names
        self.rank = rank
        self.cache = [rank] * 3

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> str:
        raise AssertionError("nothing is read")


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        (Files(["/a/x.png", "/a/y.png"]), Files(["/b/x.png", "/b/y.png"], 1), ""),
        (Files(["x.png", "y.png"]), Files(["y.png", "x.png"]), "has other data set.names"),
        (
            ConcatDataset([Files(["x", "y"])]),
            ConcatDataset([Files(["x", "z"])]),
            "has other data set.datasets[0].names",
        ),
        (TensorDataset(torch.tensor([1.0, torch.nan])), TensorDataset(torch.tensor([1.0, torch.nan])), ""),
        (list(range(10**6)), list(range(10**6, 0, -1)), "has other data set"),
        (np.arange(6).reshape(3, 2), np.arange(6).reshape(3, 2) * 2, "has other data set"),
        ([("a", 1.0), ("b", 2.0)], [("a", 1.0), ("b", 2.5)], "has other data set"),
        (range(5), [0, 1, 2, 3, 4], "has list, 5 samples"),
        (Held(np.array(["a", "b"])), Held(np.array(["a", "c"])), "has other data set.data"),
        (Held(np.array(["a", {}], dtype=object)), Held(np.array(["b", {}], dtype=object)), "has other data set.data"),
        (Held(Frame([["a", 1.0], ["b", 2.0]])), Held(Frame([["a", 1.0], ["b", 3.0]])), "has other data set.data"),
        (Frame([["a"], ["b"]]), Frame([["b"], ["a"]]), "has other data set"),
        (Held({"id": 1, "other": 2}), Held({"id": 1, "another": 2}), "has other data set.data"),
        (Held({"x": torch.ones(2), "rank": 0}, 2), Held({"x": torch.ones(2), "rank": 0}, 2), ""),
        (Held({"x": torch.ones(3), "rank": 0}, 3), Held({"x": torch.ones(3), "rank": 1}, 3), ""),
        (
            Held({"x": torch.ones(3), "rank": 0}, 3),
            Held({"x": torch.zeros(3), "rank": 0}, 3),
            "has other data set.data['x']",
        ),
        ({0: "a", 1: "b"}, {0: "a", 1: "c"}, "has other data set"),
        (
            StackDataset(x=Files(["x", "y"])),
            StackDataset(x=Files(["x", "z"])),
            "has other data set.datasets['x'].names",
        ),
    ],
)
def test_what_differs(one: Any, other: Any, difference: str) -> None:
    first, second = (Description.of(make_loader(dataset, batch_size=2)) for dataset in (one, other))
    assert second.difference(first) == difference
    assert not first.difference(first)


class Counted(list[Any]):
    """A list that counts how many of its elements are looked at, one by one."""

    looked_at = 0

    def __iter__(self) -> Any:
        for element in super().__iter__():
            self.looked_at += 1
            yield element


def test_few_elements_of_a_long_list_are_looked_at() -> None:
    files, samples = Counted(f"{number}.png" for number in range(10**6)), Counted(range(10**6))
    for dataset in (Files(files), samples):
        assert not Description.of(make_loader(dataset, batch_size=2)).difference(
            Description.of(make_loader(dataset, batch_size=2))
        )
    assert (files.looked_at, samples.looked_at) == (0, 0)
