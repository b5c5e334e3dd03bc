"""Batches on the device, and a position that counts what the training loop has received, no more and no less."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Subset, TensorDataset, get_worker_info

import paceline
from paceline.train.data.loader import Loader
from paceline.train.data.make_loader import make_loader, tuned
from paceline.train.data.to_device import to_device

pytestmark = pytest.mark.torch

META = torch.device("meta")  # a device that every machine has


class Numbers(Dataset[int]):
    """0, 1, 2, …; remembers what was read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Named(torch.Tensor):
    """A tensor of another class, which collation keeps."""


class Augmented(Numbers):
    """Each sample with a random number of every kind; the workers' own seeds and numbers differ from run to run."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), torch.rand(2), np.random.rand()


class Stream(IterableDataset[int]):
    """0, 1, 2, …, as a whole in every worker."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        assert get_worker_info() is None
        yield from range(self.size)


class ShuffledStream(Stream):
    """Draws its order, and something with each element, from the global generator."""

    def __iter__(self) -> Iterator[Any]:
        for i in torch.randperm(self.size).tolist():
            yield i, torch.rand(1)


class StatefulStream(IterableDataset[int]):
    """Resumes by itself; each element says how many this iteration has read before it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.next = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for read in itertools.count():
            if self.next >= self.size:
                break
            self.next += 1
            yield self.next - 1, read
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return self.__dict__

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class EagerStream(StatefulStream):
    """Its state is that of the beginning again as soon as the last element is out."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for read in range(self.size - self.next):
            now, self.next = self.next, (self.next + 1) % self.size
            yield now, read


class LastingStream(StatefulStream):
    """Its state stays at the end; only a new iteration goes back to the beginning."""

    is_loaded = False

    def __iter__(self) -> Iterator[tuple[int, int]]:
        if not self.is_loaded:
            self.next = 0
        self.is_loaded = False
        for read in range(self.size - self.next):
            self.next += 1
            yield self.next - 1, read

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.is_loaded = True


class BufferedStream(StatefulStream):
    """Shuffles through a buffer, which is part of its state, and draws from the global generator."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.buffer: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for read in itertools.count():
            while self.next < self.size and len(self.buffer) < 4:
                self.buffer.append(self.next)
                self.next += 1
            if not self.buffer:
                break
            yield self.buffer.pop(random.randrange(len(self.buffer))), read
        self.next = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.buffer = state["next"], state["buffer"]


STATEFUL = [StatefulStream, EagerStream, LastingStream, BufferedStream]


def collate_list(samples: list[Any]) -> list[Any]:
    return samples


def numbers(batch: Any) -> list[int]:
    return [int(x) for x in batch]


def world(world_size: int, dataset: Any, state: dict[str, Any] | None = None, **options: Any) -> list[Loader]:
    """The loaders of all ranks, gone on to `state`."""
    loaders = [make_loader(dataset, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    for loader in loaders:
        if state:
            loader.load_state_dict(state)
    return loaders


def train(loaders: list[Loader], steps: int | None = None) -> list[int]:
    """The samples that count in the next `steps` steps, or in the rest of the epoch."""
    seen = []
    for batches in itertools.islice(zip(*loaders, strict=True), steps):
        assert len({(loader.epoch, loader.position, loader.total) for loader in loaders}) == 1
        assert sum(loader.samples for loader in loaders) == loaders[0].total
        assert sum(loader.weight for loader in loaders) == pytest.approx(len(loaders))
        for loader, batch in zip(loaders, batches, strict=True):
            assert len(batch) == max(loader.samples, 1)
            seen += numbers(batch)[: loader.samples]
    return seen


def same(a: Any, b: Any) -> bool:
    """Whether two nested batches are equal, bit by bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


class TestPosition:
    @pytest.mark.parametrize("received", [0, 1, 3, 6])
    def test_what_workers_have_read_ahead_does_not_count(self, received: int) -> None:
        options = {"global_batch_size": 7, "shuffle": True, "num_workers": 2, "prefetch_factor": 4}
        options["multiprocessing_context"] = "fork"
        loader = make_loader(Numbers(40), **options)
        batches = iter(loader)
        before = [x for _ in range(received) for x in numbers(next(batches))]
        state = loader.state_dict()
        assert (state["epoch"], state["position"]) == (0, min(7 * received, 40))
        after = train(world(3, Numbers(40), state, global_batch_size=7, shuffle=True))
        assert sorted(before + after) == list(range(40))
        assert [*before, *after] == train([make_loader(Numbers(40), global_batch_size=7, shuffle=True)])

    def test_resuming_reads_nothing_that_is_skipped(self) -> None:
        dataset = Numbers(10**8)
        loader = make_loader(dataset, global_batch_size=64, shuffle=True)
        loader.load_state_dict({**loader.state_dict(), "position": 10**7})
        batch = next(iter(loader))
        assert dataset.read == numbers(batch)
        assert len(batch) == 64

    @pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
    @pytest.mark.parametrize("dataset", [Numbers(10), Stream(10)])
    def test_after_a_break_the_rest_of_the_epoch_comes(self, dataset: Any, workers: dict[str, Any]) -> None:
        loader = make_loader(dataset, global_batch_size=3, **workers)
        first = next(iter(loader))
        assert numbers(first) == [0, 1, 2]
        assert train([loader]) == [3, 4, 5, 6, 7, 8, 9]
        assert (loader.epoch, loader.position) == (1, 0)
        assert train([loader]) == list(range(10))
        loader.load_state_dict({**loader.state_dict(), "epoch": 5, "position": 6})
        assert train([loader]) == [6, 7, 8, 9]
        assert loader.epoch == 6

    def test_epochs_advance_by_themselves(self) -> None:
        loaders = world(2, Numbers(9), batch_size=2, shuffle=True, seed=4)
        first, second = train(loaders), train(loaders)
        assert sorted(first) == sorted(second) == list(range(9))
        assert first != second
        assert len(loaders[0]) == 3

    def test_only_one_iteration_at_a_time(self) -> None:
        loader = make_loader(Numbers(9), batch_size=2)
        older = iter(loader)
        next(older)
        next(iter(loader))
        with pytest.raises(RuntimeError, match="iterate the loader once at a time"):
            next(older)

    def test_a_data_set_of_another_length_is_refused(self) -> None:
        state = make_loader(Numbers(9), batch_size=2).state_dict()
        with pytest.raises(ValueError, match="dataset_size=9, now it is 10"):
            make_loader(Numbers(10), batch_size=2).load_state_dict(state)

    def test_the_global_generators_are_left_alone(self) -> None:
        random.seed(1), torch.manual_seed(1), np.random.seed(1)
        expected = random.random(), torch.rand(1), np.random.rand()
        random.seed(1), torch.manual_seed(1), np.random.seed(1)
        for _ in make_loader(Augmented(5), batch_size=2, shuffle=True):
            pass
        assert same((random.random(), torch.rand(1), np.random.rand()), expected)


class TestUnevenBatches:
    @pytest.mark.parametrize("dataset", [Numbers(5), Stream(5)])
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_rank_without_a_sample_gets_a_stand_in(self, dataset: Any, num_workers: int) -> None:
        loaders = world(3, dataset, global_batch_size=4, num_workers=num_workers)
        seen = []
        for _ in zip(*loaders, strict=True):
            seen.append([(rank.shard.indices, rank.samples, rank.total, rank.weight) for rank in loaders if rank.shard])
        assert seen == [
            [([0, 1], 2, 4, 1.5), ([2], 1, 4, 0.75), ([3], 1, 4, 0.75)],
            [([4], 1, 1, 3.0), ([4], 0, 1, 0.0), ([4], 0, 1, 0.0)],
        ]

    def test_weighted_means_over_ranks_are_means_over_samples(self) -> None:
        dataset = torch.arange(10.0) ** 2
        loaders = world(4, dataset, global_batch_size=6, shuffle=True)
        for batches in zip(*loaders, strict=True):
            means = [batch.mean() * loader.weight for loader, batch in zip(loaders, batches, strict=True)]
            own = [x for loader, batch in zip(loaders, batches, strict=True) for x in batch[: loader.samples]]
            assert sum(means) / 4 == pytest.approx(sum(own) / len(own))

    @pytest.mark.parametrize("dataset", [Numbers(9), Stream(9)])
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_evaluation_counts_each_sample_once_and_starts_again(self, dataset: Any, num_workers: int) -> None:
        loaders = world(3, dataset, batch_size=2, evaluation=True, num_workers=num_workers)
        next(iter(loaders[0]))
        for _ in range(2):
            seen = [[numbers(batch) for batch in loader] for loader in loaders]
            assert seen == [[[0, 1], [6]], [[2, 3], [7]], [[4, 5], [8]]]
        loaders = world(3, Subset(dataset, range(7)) if isinstance(dataset, Numbers) else Stream(7), batch_size=2)
        assert [len(list(loader)) for loader in loaders] == [2, 2, 2]
        loaders = world(3, dataset, global_batch_size=8, evaluation=True)
        assert [[numbers(batch) for batch in loader] for loader in loaders] == [[[0, 1, 2], [8]], [[3, 4, 5]], [[6, 7]]]

    def test_fewer_samples_than_ranks_warns(self) -> None:
        with pytest.warns(UserWarning, match="2 of them never get a sample"):
            loaders = world(4, Numbers(3), global_batch_size=2)
        assert train(loaders) == [0, 1, 2]


class TestAugmentation:
    def batches(self, num_workers: int = 0, state: dict[str, Any] | None = None, **options: Any) -> list[Any]:
        (loader,) = world(1, Augmented(20), state, batch_size=3, shuffle=True, num_workers=num_workers, **options)
        return [batch for _ in range(2) for batch in loader]

    def test_is_the_same_after_a_resume_with_any_number_of_workers(self) -> None:
        whole = self.batches()
        assert same(self.batches(num_workers=2), whole)
        state = {**make_loader(Augmented(20), batch_size=3, shuffle=True).state_dict(), "position": 9}
        assert same(self.batches(num_workers=1, state=state)[:4], whole[3:7])

    def test_differs_between_batches_epochs_and_seeds(self) -> None:
        drawn = [float(x) for seed in (0, 1) for batch in self.batches(seed=seed) for x in batch[1]]
        assert len(set(drawn)) == len(drawn) == 80

    @pytest.mark.parametrize(
        ("dataset", "options"),
        [
            (Augmented(12), {"shuffle": True}),
            (Augmented(12), {"sampler": RandomSampler(range(12), num_samples=6)}),
            (ShuffledStream(12), {}),
            (ShuffledStream(12), {"num_workers": 2, "persistent_workers": True}),
        ],
    )
    def test_is_the_same_in_each_pass_of_an_evaluation(self, dataset: Any, options: dict[str, Any]) -> None:
        (loader,) = world(1, dataset, batch_size=3, evaluation=True, **options)
        first = list(loader)
        next(iter(loader))
        assert same([list(loader), list(loader)], [first, first]), "so also after a resume"

    def test_includes_the_collate_function(self) -> None:
        def collate(samples: list[Any]) -> float:
            return random.random()

        first, second = (list(make_loader(Numbers(6), batch_size=2, collate_fn=collate)) for _ in range(2))
        assert first == second
        assert len(set(first)) == 3


class TestOrders:
    def test_user_sampler_is_sharded(self) -> None:
        loaders = world(2, Numbers(10), sampler=RandomSampler(range(10)), global_batch_size=4)
        head = train(loaders, 1)
        tail = train(world(3, Numbers(10), loaders[0].state_dict(), sampler=RandomSampler(range(10)), batch_size=1))
        assert sorted(head + tail) == list(range(10))

    @pytest.mark.parametrize(("split", "steps", "samples"), [(None, 3, [2, 1]), (False, 2, [3, 0])])
    def test_user_batches_are_divided_or_dealt(self, split: bool | None, steps: int, samples: list[int]) -> None:
        batches = [[3, 1], [0], [2, 4, 5]]
        loaders = world(2, Numbers(6), batch_sampler=batches, split_batches=split)
        for _ in zip(*loaders, strict=True):
            pass
        assert [(rank.samples, rank.total) for rank in loaders] == [(each, 3) for each in samples]
        assert len(loaders[0]) == steps

    def test_weights(self) -> None:
        assert set(train(world(2, Numbers(4), weights=[0, 1, 0, 1], batch_size=8, num_samples=100))) == {1, 3}

    def test_batches_of_tensors_are_those_of_torch(self) -> None:
        images = torch.randn(7, 4, 4, 3).permute(0, 3, 1, 2)  # not contiguous
        whole = TensorDataset(images, torch.arange(7), torch.randn(7, 2).to(torch.bfloat16))
        part = Subset(Subset(whole, [6, 2, 0, 5, 3]), [4, 1, 0, 2])
        named = TensorDataset(torch.arange(7).as_subclass(Named))
        for dataset in (whole, part, Subset(whole, np.array([3, 1])), named):
            for workers in (0, 1) if dataset is whole else (0,):
                ours = list(make_loader(dataset, batch_size=3, num_workers=workers))
                theirs = list(DataLoader(dataset, batch_size=3))
                assert same(ours, theirs)
                layouts = [[(type(batch), [(type(x), x.dtype, x.stride()) for x in batch]) for batch in both]
                           for both in (ours, theirs)]  # fmt: skip
                assert layouts[0] == layouts[1]
        (last,) = make_loader(whole, batch_size=3, sampler=[-1])
        assert same(last, next(iter(DataLoader(whole, batch_size=3, sampler=[-1]))))

    def test_many_items_are_read_in_one_call(self) -> None:
        class Table(Numbers):
            def __getitems__(self, indices: list[int]) -> list[int]:
                assert isinstance(indices, list)
                return [10 * i for i in indices]

        assert train([make_loader(Table(5), batch_size=2)]) == [0, 10, 20, 30, 40]


class TestIterable:
    @pytest.mark.parametrize("dataset", [Stream(23), ShuffledStream(23)])
    def test_each_element_once_for_any_number_of_ranks_and_workers(self, dataset: Any) -> None:
        def loaders(world_size: int, state: dict[str, Any] | None = None, **options: Any) -> list[Loader]:
            return world(world_size, dataset, state, global_batch_size=4, collate_fn=first, **options)

        def first(samples: list[Any]) -> list[int]:
            return [sample[0] if isinstance(sample, tuple) else sample for sample in samples]

        for persistent in (False, True):
            workers = {"num_workers": 2, "persistent_workers": persistent, "multiprocessing_context": "fork"}
            ranks = loaders(2, **workers)
            one, two = train(ranks), train(ranks)
            assert sorted(one) == sorted(two) == list(range(23))
            head = train(ranks, 2)
            tail = train(loaders(3, ranks[0].state_dict()))
            assert sorted(head + tail) == list(range(23))
            assert len({tuple(order) for order in (one, two, head + tail)}) == (1 if type(dataset) is Stream else 3)

    @pytest.mark.parametrize("num_workers", [0, 1, 2])
    def test_resumes_through_its_own_state(self, num_workers: int) -> None:
        options: dict[str, Any] = {"global_batch_size": 4, "collate_fn": collate_list, "num_workers": num_workers}
        (before,) = world(1, StatefulStream(11), **options)
        head = next(iter(before))
        assert before.state_dict()["stream"] == {"size": 11, "next": 4}
        ranks = world(2, StatefulStream(11), before.state_dict(), **options)
        batches = [list(loader) for loader in ranks]
        assert [x for x, _ in head] == [0, 1, 2, 3]
        assert batches == [[[(4, 0), (5, 1)], [(8, 4), (9, 5)]], [[(6, 2), (7, 3)], [(10, 6)]]]
        assert [[x for x, _ in batch] for batch in ranks[0]] == [[0, 1], [4, 5], [8, 9]]

    @pytest.mark.parametrize(
        ("size", "drop_last", "num_workers"),  # the last batch is partial, or full
        [*((size, drop_last, 0) for size in (11, 12) for drop_last in (False, True)),
         (11, False, 2), (11, True, 2), (12, False, 2)],
    )  # fmt: skip
    @pytest.mark.parametrize("kind", STATEFUL)
    def test_a_stateful_one_trains_each_element_once_wherever_it_is_resumed(
        self, kind: type[StatefulStream], size: int, drop_last: bool, num_workers: int
    ) -> None:
        options: dict[str, Any] = {"global_batch_size": 4, "collate_fn": collate_list, "drop_last": drop_last}
        whole = self.epochs(make_loader(kind(size), **options), 2)
        steps = size // 4 if drop_last else -(-size // 4)
        assert [len(epoch) for epoch in whole] == [4 * steps if drop_last else size] * 2
        if kind is not BufferedStream:
            assert whole == [list(range(len(epoch))) for epoch in whole]
        workers = {"num_workers": num_workers, "multiprocessing_context": "fork" if num_workers else None}
        for done in (steps - 1, steps):
            (loader,) = world(1, kind(size), **options, **workers)
            batches = iter(loader)
            head = [x for _ in range(done) for x, _ in next(batches)]
            state = loader.state_dict()
            for world_size in (2,) if num_workers else (1, 2, 3):
                ranks = [
                    make_loader(kind(size), rank=rank, world_size=world_size, **options, **workers)
                    for rank in range(world_size)
                ]
                for rank in ranks:
                    rank.load_state_dict(state)
                tail, following = self.together(ranks), self.together(ranks)
                assert [head + tail, following] == whole
            assert [head + self.epochs(loader, 1)[0], *self.epochs(loader, 1)] == whole, "after a break"

    def epochs(self, loader: Loader, count: int) -> list[list[int]]:
        return [[x for batch in loader for x, _ in batch] for _ in range(count)]

    def together(self, loaders: list[Loader]) -> list[int]:
        """The elements that count in the rest of the epoch."""
        return [
            x
            for batches in zip(*loaders, strict=True)
            for loader, batch in zip(loaders, batches, strict=True)
            for x, _ in batch[: loader.samples]
        ]

    @pytest.mark.parametrize("kind", STATEFUL)
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_stateful_one_begins_again_in_every_evaluation(
        self, kind: type[StatefulStream], num_workers: int
    ) -> None:
        options: dict[str, Any] = {"global_batch_size": 4, "collate_fn": collate_list, "evaluation": True}
        workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
        loader = make_loader(kind(11), multiprocessing_context="fork" if num_workers else None, **options, **workers)
        (first,) = self.epochs(loader, 1)
        next(iter(loader))
        for again in self.epochs(loader, 2):
            assert sorted(again) == sorted(first) == list(range(11))

    def test_augmentation_is_the_same_after_a_resume(self) -> None:
        options: dict[str, Any] = {"global_batch_size": 4, "num_workers": 2}
        loader = make_loader(ShuffledStream(20), **options)
        whole = list(loader)
        resumed = make_loader(ShuffledStream(20), global_batch_size=4)
        resumed.load_state_dict({**resumed.state_dict(), "position": 8})
        assert same(list(resumed), whole[2:])

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_drop_last(self, num_workers: int) -> None:
        loaders = world(2, Stream(11), global_batch_size=4, drop_last=True, num_workers=num_workers)
        assert train(loaders) == list(range(8))

    def test_anything_that_can_be_iterated_again(self) -> None:
        class Squares:
            def __iter__(self) -> Iterator[int]:
                return (i * i for i in range(5))

        loader = make_loader(Squares(), batch_size=2)
        assert train([loader]) == train([loader]) == [0, 1, 4, 9, 16]
        with pytest.raises(TypeError, match="Squares has no __len__"):
            len(loader)

    def test_is_told_the_epoch(self) -> None:
        class Epochs(Stream):
            def set_epoch(self, epoch: int) -> None:
                self.epoch = epoch

            def __iter__(self) -> Iterator[int]:
                yield self.epoch

        workers = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
        loader = make_loader(Epochs(1), batch_size=1, **workers)
        assert [train([loader]) for _ in range(3)] == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("dataset", "options", "error", "message"),
    [
        (Numbers(5), {}, ValueError, "pass batch_size, for one rank, or global_batch_size"),
        (Numbers(5), {"batch_size": 2, "global_batch_size": 4}, ValueError, "exclude each other"),
        (Numbers(5), {"batch_size": 0}, ValueError, "batch_size must be a whole number of at least 1, not 0"),
        (Numbers(0), {"batch_size": 1}, ValueError, "the data set is empty"),
        (Numbers(5), {"batch_size": 1, "shuffle": True, "sampler": [1]}, ValueError, "sampler and shuffle exclude"),
        (Numbers(5), {"batch_size": 1, "batch_sampler": [[1]]}, ValueError, "batch_sampler and batch_size exclude"),
        (Numbers(5), {"batch_size": 1, "split_batches": True}, ValueError, "split_batches is for the batches of a"),
        (Stream(5), {"batch_size": 1, "shuffle": True}, ValueError, "iterable_dataset and shuffle exclude"),
        (iter([1]), {"batch_size": 1}, TypeError, "can be iterated only once"),
        (object(), {"batch_size": 1}, TypeError, "object is not a data set"),
        (DataLoader(Numbers(5)), {"batch_size": 1}, TypeError, "pass its data set, loader.dataset"),
        (
            type("Endless", (), {"__getitem__": lambda s, i: i})(),
            {"batch_size": 1},
            TypeError,
            "Endless has no __len__",
        ),
    ],
)
def test_refuses_what_cannot_work(dataset: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_loader(dataset, **options)


@pytest.mark.parametrize(("option", "ending"), [("drop_lst", "; did you mean 'drop_last'?"), ("zzz", "")])
def test_names_an_option_that_there_is_not(option: str, ending: str) -> None:
    run = paceline.init()
    with pytest.raises(TypeError) as caught:
        run.dataloader(Numbers(5), 1, **{option: 1})
    run.close()
    assert str(caught.value) == f"run.dataloader has no option {option!r}{ending}"


class TestToDevice:
    def test_batches_arrive_on_the_device(self) -> None:
        x, labels = next(iter(make_loader([(torch.ones(2), {"label": 1})] * 4, batch_size=2, device="meta")))
        assert x.device == labels["label"].device == META
        assert x.shape == (2, 2)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_batches_arrive_on_the_gpu(self, num_workers: int) -> None:
        loader = make_loader(Numbers(9), batch_size=2, shuffle=True, device="cuda", num_workers=num_workers)
        batches = list(loader)
        assert {batch.device.type for batch in batches} == {"cuda"}
        assert sorted(x for batch in batches for x in numbers(batch)) == list(range(9))

    def test_containers_keep_their_type(self) -> None:
        class Point(NamedTuple):
            x: torch.Tensor
            name: str

        @dataclasses.dataclass(frozen=True)
        class Pair:
            left: torch.Tensor
            right: list[torch.Tensor]
            size: int = dataclasses.field(init=False, default=3)

        class Movable:
            device = None

            def to(self, device: torch.device) -> Movable:
                moved = Movable()
                moved.device = device
                return moved

        t, lock = torch.ones(1), threading.Lock()
        batch = {
            "point": Point(t, "p"),
            "pair": Pair(t, [t, t]),
            "counts": collections.defaultdict(list, a=t),
            "user": collections.UserDict(a=t),
            "movable": Movable(),
            "rest": ("text", 3, None, lock, Movable),
            "packed": torch.nn.utils.rnn.pack_sequence([t]),
        }
        moved = to_device(batch, META)
        assert isinstance(moved["point"], Point)
        assert (moved["point"].x.device, moved["point"].name) == (META, "p")
        assert isinstance(moved["pair"], Pair)
        assert {moved["pair"].left.device, *(r.device for r in moved["pair"].right)} == {META}
        assert moved["counts"]["a"].device == META
        assert moved["counts"]["new"] == []
        assert isinstance(moved["user"], collections.UserDict)
        assert moved["user"]["a"].device == moved["movable"].device == moved["packed"].data.device == META
        assert moved["rest"] == ("text", 3, None, lock, Movable)
        assert batch["counts"]["a"] is batch["pair"].left is t


class TestOptions:
    """What scripts for torch's DataLoader pass, and ask for."""

    def test_a_generator_gives_the_seed(self) -> None:
        def order(**options: Any) -> list[int]:
            return train([make_loader(Numbers(20), batch_size=4, shuffle=True, **options)])

        drawn = torch.Generator().manual_seed(7)
        torch.rand(3, generator=drawn)
        assert order(generator=drawn) == order(seed=7) != order(seed=8)
        with pytest.raises(ValueError, match="seed and generator exclude each other"):
            order(seed=7, generator=drawn)

    @pytest.mark.parametrize("evaluation", [False, True])
    def test_in_order(self, evaluation: bool) -> None:
        loader = make_loader(Numbers(20), batch_size=4, num_workers=2, in_order=False, evaluation=evaluation)
        seen = [number for batch in loader for number in numbers(batch)]
        assert sorted(seen) == list(range(20))
        assert evaluation or seen == list(range(20))

    def test_batch_size_and_sampler(self) -> None:
        one, two = world(2, Numbers(23), global_batch_size=5, shuffle=True)
        assert (one.batch_size, two.batch_size) == (3, 2)
        assert (len(one.sampler), len(two.sampler)) == (14, 9)
        indices = [list(loader.sampler) for loader in (one, two)]
        one.sampler.set_epoch(3)  # as scripts for a DistributedSampler do; epochs advance by themselves
        assert [[x for batch in loader for x in numbers(batch)] for loader in (one, two)] == indices
        own = RandomSampler(Numbers(5))
        assert make_loader(Numbers(5), batch_size=2, sampler=own).sampler is own
        batches = make_loader(Numbers(5), batch_sampler=[[0, 1], [2, 3]])
        assert (batches.batch_size, batches.batch_sampler) == (None, [[0, 1], [2, 3]])
        assert make_loader(Stream(5), batch_size=2).sampler is None

    @pytest.mark.parametrize("dataset", [Numbers(23), Stream(23)])
    def test_batch_index_continues_after_a_resume(self, dataset: Any) -> None:
        loader = make_loader(dataset, batch_size=4)
        assert [index == loader.batch_index for index, _ in enumerate(loader)] == [True] * 6
        for index, _ in enumerate(loader, loader.batch_index):
            if index == 2:
                break
        resumed = make_loader(dataset, batch_size=4)
        resumed.load_state_dict(loader.state_dict())
        assert resumed.batch_index == 3
        assert [(index, resumed.batch_index) for index, _ in enumerate(resumed, resumed.batch_index)] == [
            (3, 3), (4, 4), (5, 5),
        ]  # fmt: skip
        assert resumed.batch_index == 0


@pytest.mark.parametrize(
    ("env", "options", "expected"),
    [
        ({}, {"num_workers": 2, "timeout": 3}, {"num_workers": 2, "timeout": 3}),
        ({"NUM_WORKERS": "4", "PREFETCH_FACTOR": "8"}, {}, {"num_workers": 4, "prefetch_factor": 8}),
        ({"NUM_WORKERS": "0"}, {"num_workers": 2, "timeout": 3, "persistent_workers": True}, {"num_workers": 0}),
        ({"PREFETCH_FACTOR": "8", "PIN_MEMORY": "1"}, {}, {"pin_memory": True}),
    ],
)
def test_the_environment_says_how_a_loader_reads(
    env: dict[str, str], options: dict[str, Any], expected: dict[str, Any]
) -> None:
    given = {f"PACELINE_{name}": value for name, value in env.items()}
    assert tuned(3, options, given, evaluation=False) == (3, expected)


def test_the_environment_says_the_size_of_batches_of_training() -> None:
    env = {"PACELINE_BATCH_SIZE": "8"}
    assert tuned(None, {"global_batch_size": 4}, env, evaluation=False) == (8, {})
    assert tuned(3, {}, env, evaluation=True) == (3, {})
    assert tuned(None, {"batch_sampler": [[1]]}, env, evaluation=False) == (None, {"batch_sampler": [[1]]})
    with pytest.raises(ValueError, match="PACELINE_BATCH_SIZE='no' is no value for batch_size"):
        tuned(3, {}, {"PACELINE_BATCH_SIZE": "no"}, evaluation=False)
