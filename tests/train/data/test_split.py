"""Streams in parts: each element once, read once, on any number of ranks and workers and after any resume."""

from __future__ import annotations

import collections
import itertools
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import IterableDataset, get_worker_info  # noqa: E402

from paceline.train.data.loader import Loader  # noqa: E402
from paceline.train.data.make_loader import make_loader  # noqa: E402
from paceline.train.data.stream_parts import is_split_by_worker  # noqa: E402

pytestmark = pytest.mark.torch
T = TypeVar("T")
SIZE = 41


class Ranks:
    """Ranks as threads, of which one runs at a time and hands over in a collective."""

    def __init__(self, rank: int, world_size: int, shared: Shared) -> None:
        self.rank, self.world_size, self._shared = rank, world_size, shared
        self._number = 0

    def gather_objects(self, value: Any) -> list[Any]:
        self._number += 1
        said = self._shared.said[self._number]
        said[self.rank] = value
        self._shared.turn.release()
        self._shared.barrier.wait()
        self._shared.turn.acquire()
        return [said[rank] for rank in range(self.world_size)]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return self.gather_objects(value)[source]

    def start_all_reduce(self, tensor: Any) -> Callable[[], Any]:
        self._number += 1
        said = self._shared.said[self._number]
        said[self.rank] = tensor

        def wait() -> Any:
            while len(said) < self.world_size:
                self._shared.turn.release()
                self._shared.turn.acquire()
            return sum(said.values())

        return wait


class Shared:
    """What the threads share."""

    def __init__(self, world_size: int) -> None:
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.said: dict[int, dict[int, Any]] = collections.defaultdict(dict)


def on_ranks(world_size: int, work: Callable[[Any], T]) -> list[T]:
    """What `work` returns on each rank."""
    shared = Shared(world_size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        with shared.turn:
            try:
                results[rank] = work(Ranks(rank, world_size, shared))
            except BaseException as error:
                errors.append(error)
                shared.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world_size)]


class ByWorker(IterableDataset[int]):
    """0 … SIZE - 1, split over workers as torch's documentation advises; counts what it reads."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        start, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for i in range(start, SIZE, step):
            self.read += 1
            yield i


def own_part() -> tuple[int, int]:
    worker = get_worker_info()
    return (worker.id, worker.num_workers) if worker else (0, 1)


class ByHelper(ByWorker):
    """Uneven parts: the first has all but a few, others may have nothing; the order is drawn."""

    def __iter__(self) -> Iterator[int]:
        part, parts = own_part()
        few = min(parts - 1, 3)
        own = range(SIZE - few) if part == 0 else range(SIZE - part, SIZE - part + 1) if part <= few else range(0)
        for i in torch.randperm(len(own)).tolist():
            self.read += 1
            yield own[i]


class Stateful(ByWorker):
    """Says where it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        part, parts = own_part()
        while part + self.next * parts < SIZE:
            self.read += 1
            self.next += 1
            yield part + (self.next - 1) * parts
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class StatefulOnce(Stateful):
    """Stays at its end, as is enough for torch, whose workers begin each epoch with a new copy."""

    def __iter__(self) -> Iterator[int]:
        part, parts = own_part()
        while part + self.next * parts < SIZE:
            self.next += 1
            yield part + (self.next - 1) * parts


class StatefulAnew(StatefulOnce):
    """Keeps the state of its end, and begins anew when it is iterated, unless a state was loaded."""

    is_loaded = False

    def __iter__(self) -> Iterator[int]:
        self.next = self.next if self.is_loaded else 0
        self.is_loaded = False
        yield from super().__iter__()

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.is_loaded = True


class StatefulCounting(StatefulAnew):
    """The same in another order in each epoch, which it counts itself."""

    epochs = 0

    def __iter__(self) -> Iterator[int]:
        if not self.is_loaded or self.next == 0:
            self.epochs += 1
        yield from ((element + self.epochs * 3) % SIZE for element in super().__iter__())

    def state_dict(self) -> dict[str, int]:
        return {**super().state_dict(), "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.epochs = state["epochs"]


class ByShard(IterableDataset[int]):
    """Split by `shard`, as the streams of Hugging Face's datasets."""

    def __init__(self, num_shards: int, elements: range = range(SIZE)) -> None:
        self.num_shards = num_shards
        self.elements = elements
        self.read = 0

    def shard(self, num_shards: int, index: int) -> ByShard:
        assert num_shards <= self.num_shards
        return ByShard(1, self.elements[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        assert get_worker_info() is None
        yield from self.elements


KINDS: list[Callable[[], Any]] = [ByWorker, ByHelper, Stateful, lambda: ByShard(3), lambda: ByShard(100)]


def epoch(loader: Loader, steps: int | None = None) -> tuple[list[int], int]:
    """The elements that count in the next steps or the rest of the epoch, and how many steps they were."""
    seen, done = [], 0
    if steps == 0:
        return seen, 0
    for batch in loader:
        assert loader.total >= loader.samples <= len(batch)
        assert loader.batch_index == loader._position.batches - 1
        seen += batch.tolist()[: loader.samples]
        done += 1
        if done == steps:
            break
    return seen, done


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("looks_ahead", [False, True])
def test_each_element_once_wherever_it_is_resumed(kind: Callable[[], Any], looks_ahead: bool) -> None:
    dice = random.Random(SIZE)
    for _ in range(12):
        state: Any = None
        seen: list[int] = []
        while True:
            world_size, steps = dice.choice([1, 2, 3, 5]), dice.choice([0, 1, 2, 3, None])
            size = 6

            def work(
                ranks: Any, state: Any = state, steps: int | None = steps, size: int = size
            ) -> tuple[list[int], int, Any, list[bool]]:
                loader = make_loader(
                    kind(), global_batch_size=size, rank=ranks.rank, world_size=ranks.world_size, ranks=ranks
                )
                if looks_ahead:
                    loader.look_ahead()
                if state is not None:
                    loader.load_state_dict(state)
                return (*epoch(loader, steps), loader.state_dict(), [loader.is_last])

            results = on_ranks(world_size, work)
            assert len({done for _, done, _, _ in results}) == 1, "all ranks make the same steps"
            assert all(after == results[0][2] for _, _, after, _ in results), "and know the same of where they are"
            seen += [i for own, *_ in results for i in own]
            state = results[0][2]
            if state["epoch"] == 1:
                break
        assert sorted(seen) == list(range(SIZE))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("persistent", [False, True])
def test_each_element_once_for_workers(kind: Callable[[], Any], persistent: bool) -> None:
    options: dict[str, Any] = {"batch_size": 4, "multiprocessing_context": "fork", "persistent_workers": persistent}
    loader = make_loader(kind(), num_workers=3, **options)
    whole = [epoch(loader)[0] for _ in range(2)]
    assert [sorted(each) for each in whole] == [list(range(SIZE))] * 2
    head, _ = epoch(loader, 4)
    state = loader.state_dict()
    rest, again = epoch(loader)[0], make_loader(kind(), num_workers=3, **options)
    again.load_state_dict(state)
    assert epoch(again)[0] == rest, "the same batches in the same order"
    alone = make_loader(kind(), batch_size=4)
    alone.load_state_dict(state)
    for tail in (rest, epoch(alone)[0]):
        assert sorted(head + tail) == list(range(SIZE))
    assert sorted(epoch(alone)[0]) == list(range(SIZE)), "the next epoch is split anew"


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_parts_that_one_process_reads_one_after_the_other_each_have_a_beginning(steps: int) -> None:
    head_loader = make_loader(StatefulOnce(), num_workers=3, batch_size=4, multiprocessing_context="fork")
    head, _ = epoch(head_loader, steps)
    if not steps:
        next(iter(head_loader))
        head_loader.put_back()
    alone = make_loader(StatefulOnce(), batch_size=4)
    alone.load_state_dict(head_loader.state_dict())
    assert sorted(head + epoch(alone)[0]) == list(range(SIZE))


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        (Stateful, 2),
        (StatefulAnew, 2),  # the second time, it has been at its end
        (StatefulCounting, 1),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_parts_that_one_process_reads_have_a_beginning_in_every_epoch(
    kind: type[Stateful], times: int, workers: int
) -> None:
    head_loader = make_loader(kind(), num_workers=3, batch_size=4, multiprocessing_context="fork")
    head, _ = epoch(head_loader, 1)
    options: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
    alone = make_loader(kind(), num_workers=workers, batch_size=4, **options)
    for _ in range(times):
        alone.load_state_dict(head_loader.state_dict())
        assert sorted(head + epoch(alone)[0]) == list(range(SIZE))
        for _ in range(2):
            assert sorted(epoch(alone)[0]) == list(range(SIZE))


def test_a_stream_that_stays_at_its_end_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    loader = make_loader(StatefulOnce(), batch_size=4)
    assert len(epoch(loader)[0]) == SIZE
    assert not caplog.messages
    assert epoch(loader) == ([], 0)
    (warning,) = caplog.messages
    assert warning.startswith("StatefulOnce had no elements in epoch 1; ")


@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_is_read_twice(world_size: int) -> None:
    def work(ranks: Any) -> int:
        dataset = ByWorker()
        epoch(make_loader(dataset, global_batch_size=6, rank=ranks.rank, world_size=ranks.world_size, ranks=ranks))
        return dataset.read

    read = on_ranks(world_size, work)
    assert sum(read) == SIZE and max(read) <= SIZE // world_size + 1


def test_an_evaluation_counts_each_element_once_and_starts_again() -> None:
    def work(ranks: Any) -> list[list[int]]:
        options: dict[str, Any] = {"global_batch_size": 6, "evaluation": True}
        loader = make_loader(ByHelper(), rank=ranks.rank, world_size=ranks.world_size, ranks=ranks, **options)
        epoch(loader, 1)
        return [epoch(loader)[0] for _ in range(2)]

    one, two = on_ranks(2, work)
    for a, b in zip(one, two, strict=True):
        assert sorted(a + b) == list(range(SIZE))


class StatefulWhole(Stateful):
    """Says where it stands, and is read as a whole."""

    def __iter__(self) -> Iterator[int]:
        while self.next < SIZE:
            self.next += 1
            yield self.next - 1
        self.next = 0


@pytest.mark.soak
@pytest.mark.parametrize("kind", [StatefulWhole, Stateful])
@pytest.mark.parametrize("trial", range(int(os.environ.get("PACELINE_SOAK_STREAMS", "2"))))
def test_a_stateful_stream_with_workers_that_is_killed_eleven_times(kind: Callable[[], Any], trial: int) -> None:
    """Each life starts from the last checkpoint, and what it has done after its own last one is lost."""
    dice = random.Random(trial)
    epochs, every, size = 5, dice.choice([1, 2, 3]), 4
    state: Any = None
    done = 0
    used: list[tuple[int, int]] = []  # epoch and element, of all steps that a checkpoint holds
    for life in itertools.count():
        last = life >= 11
        until = sys.maxsize if last else dice.randint(0, 9)
        options: dict[str, Any] = {"global_batch_size": size, "num_workers": dice.choice([0, 1, 2, 3])}
        if options["num_workers"]:
            options |= {"multiprocessing_context": "fork", "persistent_workers": dice.choice([False, True])}

        def live(
            ranks: Any, state: Any = state, done: int = done, until: int = until, options: dict[str, Any] = options
        ) -> tuple[Any, int, list[tuple[int, int]]]:
            loader = make_loader(kind(), rank=ranks.rank, world_size=ranks.world_size, ranks=ranks, **options)
            if state is not None:
                loader.load_state_dict(state)
            saved: tuple[Any, int, list[tuple[int, int]]] = (state, done, [])
            seen: list[tuple[int, int]] = []
            steps = 0
            while loader.epoch < epochs:
                for batch in loader:
                    if steps == until:
                        return saved
                    steps, done = steps + 1, done + 1
                    seen += [(loader.epoch, i) for i in batch.tolist()[: loader.samples]]
                    if done % every == 0:
                        saved = (loader.state_dict(), done, list(seen))
            return loader.state_dict(), done, seen

        results = on_ranks(2 - life % 2, live)
        assert len({(repr(after), steps) for after, steps, _ in results}) == 1, "all ranks save the same"
        state, done, _ = results[0]
        used += [each for _, _, seen in results for each in seen]
        if state is not None and state["epoch"] == epochs:
            break
    assert collections.Counter(used) == {(epoch, i): 1 for epoch in range(epochs) for i in range(SIZE)}
    if kind is StatefulWhole:
        assert done == epochs * -(-SIZE // size)


class Seeds(IterableDataset[int]):
    """Asks for its worker, but not to split anything."""

    splits = False

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        if worker is not None and self.splits:
            yield from range(worker.id, SIZE, worker.num_workers)
        else:
            yield from range(SIZE)


class Overrides(ByWorker):
    """No longer split."""

    def __iter__(self) -> Iterator[int]:
        yield from range(SIZE)


class Wraps(IterableDataset[int]):
    """Reads another data set."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[int]:
        yield from self.source


@pytest.mark.parametrize(
    ("dataset", "is_split"),
    [(ByWorker(), True), (ByHelper(), True), (Overrides(), False), (Wraps(ByWorker()), True), (Wraps([1]), False)],
)
def test_what_is_split(dataset: Any, is_split: bool) -> None:
    assert is_split_by_worker(dataset) is is_split


def test_what_only_looks_as_if_it_were_split_is_refused() -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "multiprocessing_context": "fork"}
    with pytest.raises(RuntimeError, match=r"Seeds seems to split .* pass split=False to run.dataloader"):
        next(iter(make_loader(Seeds(), **options)))
    assert epoch(make_loader(Seeds(), split=False, **options))[0] == list(range(SIZE))


def test_what_shards_itself_over_ranks_is_warned_of() -> None:
    class OwnRank(ByWorker):
        def __iter__(self) -> Iterator[int]:
            yield from range(torch.distributed.get_rank(), SIZE, torch.distributed.get_world_size())

    with pytest.warns(UserWarning, match="OwnRank asks for its rank: .* yield the elements of all ranks"):
        make_loader(OwnRank(), batch_size=4, world_size=2)


def test_a_resume_where_it_can_no_longer_be_split_is_refused() -> None:
    loader = make_loader(ByWorker(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    epoch(loader, 1)
    resumed = make_loader(ByWorker(), batch_size=4, split=False)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="begun with ByWorker split in 2 parts, and now it is read as a whole"):
        next(iter(resumed))


class Table(IterableDataset[int]):
    """Can be iterated, and read by index; counts what it reads."""

    def __init__(self, order: int = 1) -> None:
        self.read = 0
        self.order = order

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return index

    def __iter__(self) -> Iterator[int]:
        for i in range(SIZE)[:: self.order]:
            self.read += 1
            yield i


@pytest.mark.parametrize(("order", "most"), [(1, SIZE // 3 + 10), (-1, SIZE + 10)])
def test_what_has_an_index_is_read_by_it_if_that_is_the_same(order: int, most: int) -> None:
    table = Table(order)
    seen: list[int] = []
    for rank in range(3):
        table.read = 0
        loader = make_loader(table, global_batch_size=6, rank=rank, world_size=3)
        assert len(loader) == 7
        head, _ = epoch(loader, 2)
        seen += head
        resumed = make_loader(table, global_batch_size=6, rank=rank, world_size=3)
        resumed.load_state_dict(loader.state_dict())
        seen += epoch(resumed)[0]
        assert table.read <= 2 * most
    assert sorted(seen) == list(range(SIZE))


def test_drop_last_leaves_out_the_rest_of_each_part() -> None:
    loader = make_loader(ByWorker(), batch_size=4, num_workers=2, multiprocessing_context="fork", drop_last=True)
    seen, steps = epoch(loader)
    assert (len(seen), len(set(seen)), steps) == (40, 40, 10)
