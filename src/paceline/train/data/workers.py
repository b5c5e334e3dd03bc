"""What runs in the workers of a data loader: reading one shard, the same wherever and whenever it is read.

While a shard is read and collated, the global random generators of Python, torch (CPU) and numpy are seeded with (seed,
epoch, position of the shard's first sample). So random augmentation of a resumed run is that of the uninterrupted one,
for any number of workers; with another number of ranks or another global batch size, shards start at other positions,
and random augmentation differs.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from .random_state import RandomStream, derive_seed
from .sampler import EpochPosition, Shard, share

Collate = Callable[[list[Any]], Any]


class MapFetch(Dataset[Any]):
    """A map-style data set whose items are whole shards, collated.

    Args:
        dataset: the user's data set.
        collate_fn: makes a batch from a list of samples.
        seed: seed of random augmentation.
    """

    def __init__(self, dataset: Any, collate_fn: Collate, seed: int) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._seed = seed
        self._random = RandomStream()

    def __getitems__(self, shard: Shard) -> tuple[Any, Shard]:
        with self._random.active(derive_seed(self._seed, shard.epoch, shard.first)):
            if callable(read_many := getattr(self._dataset, "__getitems__", None)):
                samples = read_many(shard.indices)
            else:
                samples = [self._dataset[index] for index in shard.indices]
            return self._collate_fn(samples), shard


class StreamFetch(IterableDataset[Any]):
    """An iterable data set whose elements are whole shards, collated.

    Global batches are cut from the stream in order, and global batch k after the start is read by worker k modulo the
    number of workers, the order in which a DataLoader asks its workers. Every worker of every rank reads the whole
    stream and keeps its shards. So the stream must be the same in every process: the data set must not shard itself
    over ranks. Where it shards itself over workers, as `get_worker_info` invites it to, it is told that there are none.

    Resuming loads the data set's own state, where it has `state_dict` and `load_state_dict`: the state must say which
    element comes next, as after the last one that `__iter__` has yielded. It is read before the next element is asked
    for, and the epoch's last batch is known as such, so a state of the end is never loaded: data sets may reset theirs
    there. Other data sets are read and skipped from the start of the epoch. Either way each element is used exactly
    once, if the data set yields the same ones in the same order again. An order drawn from the global random generators
    is the same again, for the same global batch size.

    Args:
        dataset: the user's data set.
        collate_fn: makes a batch from a list of samples.
        seed: seed of whatever the data set draws from the global random generators.
        rank: this rank.
        world_size: number of ranks.
        drop_last: leave out a last global batch that is smaller.
        stand_in: where this rank has no element of a global batch, read rank 0's instead of stopping.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        collate_fn: Collate,
        *,
        seed: int,
        rank: int,
        world_size: int,
        drop_last: bool,
        stand_in: bool,
    ) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._seed = seed
        self._global_batch_size = 0  # elements of a step over all ranks together, from `begin` on
        self._rank = rank
        self._world_size = world_size
        self._drop_last = drop_last
        self._stand_in = stand_in
        self._random = RandomStream()
        self._random_batch = RandomStream()  # of its own, since the other one is continued
        self._start: tuple[int, int, Any] = (0, 0, None)
        self._is_stateful = hasattr(dataset, "load_state_dict") and hasattr(dataset, "state_dict")
        self._looks_ahead = self._is_stateful
        self._first_state: Any = None  # of the data set, before the first iteration in this process
        self._is_within = False  # an iteration of the data set has not come to its end

    def begin(self, start: EpochPosition) -> None:
        """Let the next iteration begin at `start`; the one after it is the next epoch, in workers that live on too."""
        self._start = (start.epoch, start.position, start.stream)
        self._global_batch_size = start.global_batch_size
        self._looks_ahead = self._is_stateful or start.looks_ahead

    def __iter__(self) -> Iterator[tuple[Any, Shard]]:
        worker = get_worker_info()
        worker_id, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        epoch = self._start[0]
        for step, cut in enumerate(self._cuts(worker_id, workers)):
            start, stop = cut.start, cut.start + len(cut.elements)
            low, high, samples = share(start, stop, self._rank, self._world_size)
            if not samples and not self._stand_in:
                break
            if step % workers == worker_id:
                indices = list(range(low, high))
                shard = Shard(indices, samples, stop - start, epoch, low, stop, cut.is_last, cut.state)
                with self._random_batch.active(derive_seed(self._seed, epoch, low, 1)):
                    batch = self._collate_fn(cut.elements[low - start : high - start])
                yield batch, shard
        self._start = (epoch + 1, 0, None)

    def _cuts(self, worker_id: int, workers: int) -> Iterator[_Cut]:
        """The global batches from the start of this iteration on; those of this worker with the data set's state."""
        epoch, position, stream = self._start
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(epoch)
        at = self._load_state(position, stream)
        elements: Iterator[Any] | None = None
        ahead: list[Any] | None = None  # of the next global batch, as far as it was read already
        step = 0
        while True:
            skips = at < position
            size = min(self._global_batch_size, position - at) if skips else self._global_batch_size
            taken = ahead or []
            with self._reading(None if ahead else derive_seed(self._seed, epoch, at)):
                elements = iter(self._dataset) if elements is None else elements
                taken += itertools.islice(elements, size - len(taken))
            is_last, state, ahead = len(taken) < size, None, None
            if not is_last and not skips and self._looks_ahead:
                if self._is_stateful and step % workers == worker_id:
                    state = copy.deepcopy(self._dataset.state_dict())  # type: ignore[attr-defined]  # it has one
                # A smaller batch is dropped: only when the next one is complete, this one is not the last.
                least = size if self._drop_last else 1
                with self._reading(derive_seed(self._seed, epoch, at + size), continued=True):
                    ahead = list(itertools.islice(elements, least))
                is_last = len(ahead) < least
            if is_last:
                self._is_within = False
            if taken and not skips and not (self._drop_last and len(taken) < size):
                yield _Cut(at, taken, is_last, None if is_last else state)
                step += 1
            if is_last:
                return
            at += size

    def _load_state(self, position: int, stream: Any) -> int:
        """Bring the data set to where its state `stream` is, or to its beginning; returns the position there."""
        if not self._is_stateful:
            return 0
        dataset: Any = self._dataset
        if self._first_state is None:
            self._first_state = copy.deepcopy(dataset.state_dict())
        if stream is not None:
            dataset.load_state_dict(copy.deepcopy(stream))
        elif self._is_within:
            dataset.load_state_dict(copy.deepcopy(self._first_state))
        self._is_within = True
        return 0 if stream is None else position

    @contextlib.contextmanager
    def _reading(self, seed: int | None, *, continued: bool = False) -> Iterator[None]:
        """Around asking the data set for elements."""
        with _without_worker_info(), self._random.active(seed, continued=continued):
            yield


@dataclass(slots=True)
class _Cut:
    """A global batch of a stream.

    Attributes:
        start: position of the first element.
        elements: all of them.
        is_last: whether the epoch ends with it.
        state: of the data set after it, where it has one and the epoch goes on.
    """

    start: int
    elements: list[Any]
    is_last: bool
    state: Any


@contextlib.contextmanager
def _without_worker_info() -> Iterator[None]:
    """Let `torch.utils.data.get_worker_info()` return None, as in the main process."""
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
