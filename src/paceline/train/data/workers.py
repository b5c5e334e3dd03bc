"""What runs in the workers of a data loader: reading shards, with the same result in any process and after any resume.

While a shard is read and collated, the global random generators of Python, torch (CPU) and numpy are seeded with (seed,
epoch, position of the shard's first sample). So random augmentation in a resumed run is the same as in an uninterrupted
one, for any number of workers. With another number of ranks or another global batch size, shards start at other
positions, and random augmentation differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate, get_worker_info

from .random_state import RandomStream, derive_seed
from .sampler import EpochPosition, Shard, share
from .source import Indexed, Source, as_worker
from .stream_parts import Parts, Progress, is_split_by_shard

Collate = Callable[[list[Any]], Any]


class MapFetch(Dataset[Any]):
    """A map-style data set whose items are whole shards, collated."""

    def __init__(self, dataset: Any, collate_fn: Collate, seed: int) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._seed = seed
        self._random = RandomStream()

    def __getitems__(self, shard: Shard) -> tuple[Any, Shard]:
        if (batch := self._batch_of_tensors(shard.indices)) is not None:
            return batch, shard
        with self._random.active(derive_seed(self._seed, shard.epoch, shard.first)):
            if callable(read_many := getattr(self._dataset, "__getitems__", None)):
                samples = read_many(shard.indices)
            else:
                samples = [self._dataset[index] for index in shard.indices]
            return self._collate_fn(samples), shard

    def _batch_of_tensors(self, indices: Sequence[Any]) -> list[Tensor] | None:
        """Samples of tensors, read at once: what their collation gives; None if anything else is to be read.

        Neither reading nor collating them draws random numbers.
        """
        dataset: Any = self._dataset
        while type(dataset) is Subset:
            dataset, indices = dataset.dataset, [dataset.indices[index] for index in indices]
        if type(dataset) is not TensorDataset or self._collate_fn is not default_collate:
            return None
        if not all(type(index) is int for index in indices) or any(map(_is_special, dataset.tensors)):
            return None
        rows = torch.tensor(indices)
        return [tensor[rows].contiguous() for tensor in dataset.tensors]


def _is_special(tensor: Tensor) -> bool:
    """Whether rows of a tensor may not be collated as one expects."""
    return type(tensor) is not Tensor or tensor.layout is not torch.strided


class StreamFetch(IterableDataset[Any]):
    """An iterable data set whose elements are whole shards, collated.

    A stream that can be split (see `parts`) is read in parts, each by one worker of one rank. From every other stream,
    global batches are cut in order. Worker k modulo the number of workers makes global batch k after the start, as a
    DataLoader asks its workers in that order. Every worker of every rank then reads the whole stream and keeps its own
    shards; if the data set has `__getitem__` and `__len__` as well, each reads only its own samples. So the stream must
    be the same in every process: the data set must not shard itself over ranks.

    If the data set has `state_dict` and `load_state_dict`, resuming loads its own state. This state must continue after
    the last element that `__iter__` has yielded. It is read before the next element is requested. A state after the
    last element is never loaded, since data sets may reset their state there. Other data sets are iterated from the
    start of the epoch, and elements are skipped. In both cases each element is used exactly once if the data set yields
    the same elements in the same order again. An order that is drawn from the global random generators is the same
    again, for the same global batch size.
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
        evaluation: bool,
    ) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._seed = seed
        self._global_batch_size = 0  # elements per step of all ranks together, set by `begin`
        self._rank = rank
        self._world_size = world_size
        self._drop_last = drop_last
        self._evaluation = evaluation
        self._random = RandomStream()
        self._random_batch = RandomStream()  # of its own, since the other one is continued
        self._start: tuple[int, int, Any] = (0, 0, None)
        self._parts: Parts | None = None  # how the epoch is split, and from where it goes on
        self._source = Source(dataset)
        self._indexed = Indexed(dataset) if Indexed.may_be(dataset) else None
        self._looks_ahead = False

    def begin(self, start: EpochPosition, parts: Parts | None = None) -> None:
        """Set where the next iteration begins.

        The one after it is the next epoch, also in persistent workers; in an evaluation, it is the same one again.
        """
        self._start = (start.epoch, start.position, start.stream)
        self._parts = parts
        self._global_batch_size = start.global_batch_size
        self._looks_ahead = self._source.is_stateful or start.looks_ahead

    def __iter__(self) -> Iterator[tuple[Any, Shard]]:
        worker = get_worker_info()
        worker_id, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from self._in_parts(worker_id, workers) if self._parts is not None else self._whole(worker_id, workers)
        self._start = (self._start[0] + (not self._evaluation), 0, None)
        self._parts = Parts(self._parts.count) if self._parts is not None else None

    def _in_parts(self, worker_id: int, workers: int) -> Iterator[tuple[Any, Shard]]:
        """This worker's parts, one after the other; the batches of the other ranks are not known here."""
        assert self._parts is not None
        epoch = self._start[0]
        low, high, _ = share(0, self._global_batch_size, self._rank, self._world_size)
        reader = PartReader(self._source, self._collate_fn, seed=self._seed, drop_last=self._drop_last)
        own = self._parts.of_rank(self._rank, self._world_size)[worker_id::workers]
        for number, (part, progress) in enumerate(own):
            count = self._parts.count
            batches = reader.batches(epoch, part, count, progress, size=high - low, is_first=number == 0)
            for batch, samples, after in batches:
                first = after.count - samples
                yield batch, Shard([], samples, samples, epoch, first, after.count, False, (part, after))
                del batch  # before the next one is made, which reuses its memory

    def _whole(self, worker_id: int, workers: int) -> Iterator[tuple[Any, Shard]]:
        """The shards of this worker and rank, of global batches that are cut from the whole stream."""
        epoch = self._start[0]
        for step, cut in enumerate(self._cuts(worker_id, workers)):
            start, stop = cut.start, cut.start + len(cut.elements)
            low, high, samples = share(start, stop, self._rank, self._world_size)
            if not samples and self._evaluation:
                return
            if step % workers == worker_id:
                indices = list(range(low, high))
                shard = Shard(indices, samples, stop - start, epoch, low, stop, cut.is_last, cut.state)
                with self._random_batch.active(derive_seed(self._seed, epoch, low, 1)):
                    batch = self._collate_fn(list(cut.elements[low - start : high - start]))
                yield batch, shard

    def _cuts(self, worker_id: int, workers: int) -> Iterator[_Cut]:
        """The global batches from the start of this iteration; those of this worker have the data set's state."""
        epoch, position, stream = self._start
        self._source.set_epoch(epoch)
        if self._indexed is not None and self._indexed.is_iterated_in_order(derive_seed(self._seed, epoch)):
            yield from self._indexed_cuts(self._indexed, position)
            return
        at = self._source.begin(position, stream)
        elements: Iterator[Any] | None = None
        ahead: list[Any] | None = None  # of the next global batch, as far as it was read already
        step = 0
        while True:
            skips = at < position
            size = min(self._global_batch_size, position - at) if skips else self._global_batch_size
            taken = ahead or []
            seed = None if ahead else derive_seed(self._seed, epoch, at)
            with as_worker(None), self._random.active(seed):
                elements = self._source.elements() if elements is None else elements
                taken += itertools.islice(elements, size - len(taken))
            is_last, state, ahead = len(taken) < size, None, None
            if not is_last and not skips and self._looks_ahead:
                if self._source.is_stateful and step % workers == worker_id:
                    state = self._source.state()
                # A smaller batch is dropped: only when the next one is complete, this one is not the last.
                least = size if self._drop_last else 1
                following = derive_seed(self._seed, epoch, at + size)
                with as_worker(None), self._random.active(following, continued=True):
                    ahead = list(itertools.islice(elements, least))
                is_last = len(ahead) < least
            if is_last:
                self._source.end()
            if taken and not skips and not (self._drop_last and len(taken) < size):
                yield _Cut(at, taken, is_last, None if is_last else state)
                step += 1
            if is_last:
                return
            at += size

    def _indexed_cuts(self, indexed: Indexed, position: int) -> Iterator[_Cut]:
        """The same for elements that are read by index when they are used, each by one worker of one rank."""
        size, end = self._global_batch_size, len(indexed)
        for at in range(position, end, size):
            stop = min(at + size, end)
            if self._drop_last and stop - at < size:
                return
            is_last = stop == end or (self._drop_last and end - stop < size)
            yield _Cut(at, indexed.between(at, stop, derive_seed(self._seed, self._start[0], at)), is_last, None)


@dataclass(slots=True)
class _Cut:
    """A global batch of a stream."""

    start: int  # position of the first element
    elements: Sequence[Any]  # all of them
    is_last: bool  # whether the epoch ends with it
    state: Any  # state of the data set after it, if it has a state and the epoch goes on


# -- a stream in parts -------------------------------------------------------------------------------------------------


class PartInfo:
    """What `get_worker_info()` returns while a part is read: the parts appear as workers."""

    def __init__(self, part: int, parts: int, seed: int, dataset: Any) -> None:
        self.id, self.seed, self.dataset = part, seed, dataset
        self.is_used = False  # whether the number of parts was asked for: else nothing can have been split
        self._parts = parts

    @property
    def num_workers(self) -> int:
        self.is_used = True
        return self._parts


class PartReader:
    """Yields batches of a part of a stream, from where reading has stopped before.

    What a data set draws from the global random generators depends only on the seed, the epoch, the part, and how much
    of the part was read. So it is the same after a resume, in any worker of any rank.
    """

    def __init__(self, source: Source, collate_fn: Callable[[list[Any]], Any], *, seed: int, drop_last: bool) -> None:
        self._source = source
        self._collate_fn = collate_fn
        self._seed = seed
        self._drop_last = drop_last
        self._random = RandomStream()
        self._random_batch = RandomStream()  # of its own, since the other one is continued

    def batches(
        self, epoch: int, part: int, parts: int, progress: Progress, *, size: int, is_first: bool
    ) -> Iterator[tuple[Any, int, Progress]]:
        """Yield batches of a part, each with the number of its samples and the progress after it."""
        source, info = self._part(epoch, part, parts)
        own = type(source.dataset).__name__
        at = source.begin(progress.count, progress.state, another_part=source is self._source and not is_first)
        # For a data set without a state, draws start from the beginning, as when it was read the first time.
        start = (self._seed, epoch, part) if at == 0 else (self._seed, epoch, part, at)
        with as_worker(info), self._random.active(derive_seed(*start), continued=True):
            elements = source.elements()
            next(itertools.islice(elements, progress.count - at, progress.count - at), None)
        count, ahead = progress.count, list[Any]()
        while True:
            with as_worker(info), self._random.active(continued=True):
                taken = ahead + list(itertools.islice(elements, size - len(ahead)))
            if taken and info is not None and not info.is_used:
                raise RuntimeError(
                    f"{own} seems to split its elements over workers by get_worker_info(), but has not asked how many "
                    "there are: pass split=False to run.dataloader, so that it is read as a whole"
                )
            is_last, state, ahead = len(taken) < size, None, []
            if not is_last and source.is_stateful:
                state = source.state()
                least = size if self._drop_last else 1
                seed = derive_seed(self._seed, epoch, part, count + size)
                with as_worker(info), self._random.active(seed, continued=True):
                    ahead = list(itertools.islice(elements, least))
                is_last = len(ahead) < least
            if is_last:
                source.end()
            if taken and not (self._drop_last and len(taken) < size):
                with self._random_batch.active(derive_seed(self._seed, epoch, part, count, 1)):
                    batch = [self._collate_fn(taken)]
                samples = len(taken)
                count += samples
                del taken  # with what is yielded, it is freed before the next ones are read, which reuse the memory
                yield batch.pop(), samples, Progress(count, is_last, None if is_last else state)
            if is_last:
                return

    def _part(self, epoch: int, part: int, parts: int) -> tuple[Source, PartInfo | None]:
        """The data set of a part, and the worker information that it gets."""
        self._source.set_epoch(epoch)
        dataset = self._source.dataset
        if is_split_by_shard(dataset):
            source = Source(dataset.shard(num_shards=parts, index=part))
            source.set_epoch(epoch)
            return source, None
        seed = derive_seed(self._seed, epoch, part, 2)
        return self._source, PartInfo(part, parts, seed, dataset)
