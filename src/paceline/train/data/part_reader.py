"""Reads a part of a stream that is split: with the same result in any process and after any resume."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from .random_state import RandomStream, derive_seed
from .source import Source, as_worker
from .stream_parts import Progress, is_split_by_shard


class PartInfo:
    """What `get_worker_info()` returns while a part is read: the parts appear as workers.

    Attributes:
        id: number of the part.
        seed: of what is drawn for the part.
        dataset: the data set.
        is_used: whether the data set has asked for the number of parts; otherwise it cannot have split anything.
    """

    def __init__(self, part: int, parts: int, seed: int, dataset: Any) -> None:
        self.id, self.seed, self.dataset = part, seed, dataset
        self.is_used = False
        self._parts = parts

    @property
    def num_workers(self) -> int:
        """How many parts there are."""
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
