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
    element comes next, as after the last one that `__iter__` has yielded. Other data sets are read and skipped from the
    start of the epoch. Either way each element is used exactly once, if the data set yields the same ones in the same
    order again. An order drawn from the global random generators is the same again, for the same global batch size.

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
        self._start: tuple[int, int, Any] = (0, 0, None)

    def begin(self, start: EpochPosition) -> None:
        """Let the next iteration begin at `start`; the one after it is the next epoch, in workers that live on too."""
        self._start = start.mark()
        self._global_batch_size = start.global_batch_size

    def __iter__(self) -> Iterator[tuple[Any, Shard]]:
        worker = get_worker_info()
        worker_id, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        epoch = self._start[0]
        for step, (start, elements, stream) in enumerate(self._global_batches()):
            stop = start + len(elements)
            low, high, samples = share(start, stop, self._rank, self._world_size)
            if not samples and not self._stand_in:
                break
            if step % workers == worker_id:
                shard = Shard(list(range(low, high)), samples, len(elements), epoch, low, stop, copy.deepcopy(stream()))
                with self._random.active(derive_seed(self._seed, epoch, low, 1)):
                    batch = self._collate_fn(elements[low - start : high - start])
                yield batch, shard
        self._start = (epoch + 1, 0, None)

    def _global_batches(self) -> Iterator[tuple[int, list[Any], Callable[[], Any]]]:
        """The global batches from the start of this iteration on.

        Yields:
            Position of the first element, the elements, and a function that returns the data set's state after them.
        """
        epoch, position, stream = self._start
        state: Callable[[], Any] = _nothing
        if hasattr(self._dataset, "load_state_dict") and hasattr(self._dataset, "state_dict"):
            state = self._dataset.state_dict
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(epoch)
        at = 0
        if stream is not None:
            self._dataset.load_state_dict(copy.deepcopy(stream))  # type: ignore[attr-defined]  # has given the state
            at = position
        elements: Iterator[Any] | None = None
        while True:
            size = min(self._global_batch_size, position - at) if at < position else self._global_batch_size
            with _without_worker_info(), self._random.active(derive_seed(self._seed, epoch, at)):
                elements = iter(self._dataset) if elements is None else elements
                taken = list(itertools.islice(elements, size))
            if at >= position and taken and not (self._drop_last and len(taken) < size):
                yield at, taken, state
            if len(taken) < size:
                return
            at += size


def _nothing() -> None:
    """The state of a data set that has none."""


@contextlib.contextmanager
def _without_worker_info() -> Iterator[None]:
    """Let `torch.utils.data.get_worker_info()` return None, as in the main process."""
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
