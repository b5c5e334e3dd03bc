"""The data loader of a training script: torch's DataLoader, sharded over ranks, that knows where training is.

What counts as consumed is what the training loop has received. Workers read ahead of it, and what they have read but
nobody has received yet is read again after a resume.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from .keep_working import KeepWorking
from .random_state import derive_seed
from .sampler import (
    ElasticSampler,
    EpochPosition,
    Shard,
    ShardedSampler,
    UserBatchSampler,
    UserSampler,
    check_positive,
)
from .to_device import to_device
from .workers import Collate, MapFetch, StreamFetch

T = TypeVar("T")
log = logging.getLogger("paceline")


class Loader:
    """Yields this rank's batches, on the device, from where training is to the end of the epoch.

    The next iteration is the next epoch. After a `break`, it goes on with the rest of the epoch, so that no sample is
    left out; in evaluation, it starts again. All ranks get the same number of batches: a rank for which the last,
    uneven global batch has no sample gets rank 0's first one as a stand-in, whose loss must count nothing (its
    `weight` is 0). In evaluation, such a rank stops one batch early instead.

    `state_dict()` is where training is after the batch yielded last, the same on every rank: take it once the optimizer
    has stepped on that batch. Build one with `make_loader`.

    Attributes:
        dataset: the whole data set, of which this rank gets its share.
        shard: what the batch yielded last is made of, None before the first.
        on_evaluation: called with True before each batch of an evaluation, and with False when it has ended.
    """

    def __init__(
        self,
        dataset: Any,
        position: EpochPosition,
        build: Callable[[], DataLoader[Any]],
        *,
        keeps_batch: bool,
        steps: Callable[[], int],
        world_size: int,
        device: torch.device,
        evaluation: bool,
        stream: StreamFetch | None,
    ) -> None:
        self.dataset = dataset
        self.shard: Shard | None = None
        self.on_evaluation: Callable[[bool], None] = _ignore
        self._position = position
        self._build = build
        self._keeps_batch = keeps_batch
        self._steps = steps
        self._world_size = world_size
        self._device = device
        self._is_there = device.type == "cpu"  # where data sets make their samples
        self._evaluation = evaluation
        self._stream = stream
        self._dataloader = build()
        self._workers_follow = False  # living workers of an iterable data set are about to begin where training is
        self._iterations = 0
        self._before = position.mark()  # where training was before the batch yielded last

    def __len__(self) -> int:
        """Batches of a whole epoch.

        Raises:
            TypeError: the data set or the user's sampler has no length.
        """
        return self._steps()

    def __iter__(self) -> Iterator[Any]:
        return self._evaluate() if self._evaluation else self._batches()

    def _evaluate(self) -> Iterator[Any]:
        """The batches, of which each is announced as one of an evaluation."""
        try:
            for batch in self._batches():
                self.on_evaluation(True)
                yield batch
        finally:
            self.on_evaluation(False)

    def _batches(self) -> Iterator[Any]:
        """The batches from where training is to the end of the epoch."""
        self._iterations += 1
        iteration = self._iterations
        if self._evaluation:
            self._position.rewind()
        if self._position.is_over:  # where its last batch was trained on, and then the loop was left or a state saved
            self._workers_follow = False
            self._position.end_epoch()
            return
        for batch, shard in self._start(self._packets()):
            if iteration != self._iterations:
                raise RuntimeError(
                    "this iteration of the loader is over, since a later one has begun or a state was loaded: "
                    "iterate the loader once at a time"
                )
            self._before = self._position.mark()
            self._position.advance(shard)
            self.shard = shard
            yield batch if self._is_there else to_device(batch, self._device, non_blocking=self._dataloader.pin_memory)
        self._position.end_epoch()
        self._workers_follow = self._dataloader.persistent_workers

    def _packets(self) -> Iterable[tuple[Any, Shard]]:
        """Batches with what they are made of, from where training is."""
        if self._stream is not None and not self._workers_follow:
            self._stream.begin(self._position)
            self._dataloader = self._build()  # workers that live on would not hear of it
        self._workers_follow = False
        return self._dataloader

    def _start(self, packets: Iterable[tuple[Any, Shard]]) -> Iterator[tuple[Any, Shard]]:
        """Begin to iterate, which may start workers."""
        init = self._dataloader.worker_init_fn
        if not isinstance(init, KeepWorking) or not self._dataloader.num_workers:
            return iter(packets)
        with init.starting(self._dataloader.multiprocessing_context):
            return iter(packets)

    @property
    def epoch(self) -> int:
        """The epoch of the batch yielded last; the next one as soon as an iteration has ended."""
        return self._position.epoch

    @property
    def position(self) -> int:
        """Samples of the epoch that all ranks together have received; batches where there is a batch sampler."""
        return self._position.position

    @property
    def done(self) -> int:
        """Batches of this size that bring the epoch to where it is."""
        return self.position // (self._position.global_batch_size or self._world_size)

    @property
    def samples(self) -> int:
        """This rank's samples in the batch yielded last, 0 for a stand-in."""
        return self.shard.samples if self.shard else 0

    @property
    def total(self) -> int:
        """Samples of all ranks together in this step."""
        return self.shard.total if self.shard else 0

    @property
    def weight(self) -> float:
        """What to multiply this rank's mean loss by, to make the mean over ranks the mean over the step's samples."""
        return self.samples * self._world_size / self.total if self.total else 0.0

    @property
    def left(self) -> int | None:
        """Samples of all ranks together that the epoch has left after this step; None where that is not known."""
        return self._position.left(self.shard) if self.shard else None

    @property
    def is_last(self) -> bool:
        """Whether the epoch ends with this step; False also where that is not known, see `look_ahead`."""
        return self.shard.is_last if self.shard else False

    def look_ahead(self) -> None:
        """From the next iteration on, find out which batch is an epoch's last by asking for what comes after it."""
        if not self._position.looks_ahead:
            self._position.looks_ahead = True
            self._workers_follow = False

    def put_back(self) -> None:
        """Let the batch yielded last count as not yielded: the next iteration begins with it."""
        self._position.go_back(self._before)

    def state_dict(self, *, before: bool = False) -> dict[str, Any]:
        """Where training is: small, the same on every rank, of any use to another number of ranks.

        Args:
            before: where it was before the batch yielded last.
        """
        state = self._position.state_dict()
        if before:
            state |= dict(zip(("epoch", "position", "stream", "is_over"), self._before, strict=True))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken; reads no data, and ends an iteration that is under way.

        The global batch size becomes that of `state` where the loader was made with `batch_size`.

        Raises:
            ValueError: the data set's length, the kind of order or the seed are not those of `state`.
        """
        self._position.load_state_dict(state)
        size, now = state["global_batch_size"], self._position.global_batch_size
        if self._keeps_batch and size and size != now:
            log.info("going on with the global batch size %d of the checkpoint instead of %d", size, now)
            self._position.global_batch_size = size
        self._iterations += 1
        self._workers_follow = False


def make_loader(
    dataset: Any,
    *,
    batch_size: int | None = None,
    global_batch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    num_workers: int = 0,
    collate_fn: Collate | None = None,
    sampler: Iterable[Any] | None = None,
    batch_sampler: Iterable[list[Any]] | None = None,
    weights: Tensor | Iterable[float] | None = None,
    replacement: bool = True,
    num_samples: int | None = None,
    drop_last: bool = False,
    evaluation: bool = False,
    pin_memory: bool | None = None,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    multiprocessing_context: Any = None,
    timeout: float = 0,
    worker_init_fn: Callable[[int], None] | None = None,
) -> Loader:
    """Build the loader of a map-style or iterable data set.

    What is not described here is as in `torch.utils.data.DataLoader`.

    Args:
        dataset: with `__getitem__` and `__len__`, or with `__iter__`; see `StreamFetch` for what the latter must do.
        batch_size: samples a step and rank, so that the global batch size is this times the number of ranks of the
            first start; it stays that when a checkpoint is resumed with another number of ranks.
        global_batch_size: samples a step, over all ranks together; give one of the two.
        shuffle: a new order every epoch, see `ElasticSampler`.
        seed: seed of the order and of random augmentation, the same on every rank.
        rank: this rank.
        world_size: number of ranks.
        device: where batches go.
        sampler: the user's own order, see `UserSampler`.
        batch_sampler: the user's own batches, see `UserBatchSampler`.
        weights: one number a sample, for weighted draws, see `ElasticSampler`.
        replacement: weighted draws may repeat a sample within an epoch.
        num_samples: weighted draws an epoch; the length of the data set if None.
        drop_last: leave out the last global batch of an epoch where it is smaller.
        evaluation: every iteration starts with the first sample; ranks without a sample stop early.
        pin_memory: copy batches to pinned memory first; None means on GPUs.

    Raises:
        TypeError: the data set has neither items with a length nor elements, or can be iterated only once.
        ValueError: a number is out of range, or options exclude each other.
    """
    orders = {"sampler": sampler, "batch_sampler": batch_sampler, "weights": weights, "shuffle": shuffle or None}
    _at_most_one(**orders)
    target = torch.device(device)
    build = functools.partial(
        DataLoader[Any],
        num_workers=num_workers,
        collate_fn=_as_it_is,  # the data set collates
        pin_memory=target.type == "cuda" if pin_memory is None else pin_memory,
        timeout=timeout,
        worker_init_fn=worker_init_fn,
        multiprocessing_context=multiprocessing_context,
        # Otherwise each iteration draws from the global generator, which a resumed run does once more.
        generator=torch.Generator().manual_seed(derive_seed(seed, rank)),
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
    )
    loader = functools.partial(
        Loader, dataset, world_size=world_size, device=target, evaluation=evaluation, keeps_batch=batch_size is not None
    )
    sharding: dict[str, Any] = {"seed": seed, "rank": rank, "world_size": world_size}
    collate = collate_fn or default_collate
    size = 0
    if batch_sampler is None:
        size = _global_batch_size(batch_size, global_batch_size, world_size)
        sharding |= {"drop_last": drop_last}
    else:
        cuts = {"batch_size": batch_size, "global_batch_size": global_batch_size, "drop_last": drop_last or None}
        _at_most_one(batch_sampler=batch_sampler, **cuts)
    if _is_iterable(dataset):
        _at_most_one(iterable_dataset=dataset, **orders)
        stream = StreamFetch(dataset, collate, stand_in=not evaluation, **sharding)
        position = EpochPosition(order="iterable", seed=seed, size=_length(dataset), global_batch_size=size)
        steps = functools.partial(_steps, dataset, position, drop_last)
        return loader(position, lambda: build(stream, batch_size=None), steps=steps, stream=stream)
    draws = {"weights": weights, "replacement": replacement, "num_samples": num_samples}
    if batch_sampler is None:
        sharding |= {"global_batch_size": size}
    shards = _sampler(dataset, sampler, batch_sampler, {"shuffle": shuffle, **draws}, sharding)
    fetch, plan = MapFetch(dataset, collate, seed), _Plan(shards, stand_in=not evaluation)
    batches: Any = plan  # the DataLoader passes on whatever its batch sampler yields
    return loader(shards, lambda: build(fetch, batch_sampler=batches), steps=shards.__len__, stream=None)


def _sampler(
    dataset: Any,
    sampler: Iterable[Any] | None,
    batch_sampler: Iterable[list[Any]] | None,
    order: dict[str, Any],
    sharding: dict[str, Any],
) -> ShardedSampler:
    """The sampler of a map-style data set."""
    size = _length(dataset)
    if batch_sampler is not None:
        return UserBatchSampler(batch_sampler, size=size, **sharding)
    if sampler is not None:
        return UserSampler(sampler, size=size, **sharding)
    if size is None:
        raise TypeError(f"{type(dataset).__name__} has no __len__: add it, or pass a sampler")
    return ElasticSampler(size, **order, **sharding)


class _Plan:
    """The batch sampler of the DataLoader: reads ahead of training, which its own position does not move."""

    def __init__(self, sampler: ShardedSampler, *, stand_in: bool) -> None:
        self._sampler = sampler
        self._stand_in = stand_in

    def __iter__(self) -> Iterator[Shard]:
        for shard in self._sampler.ahead():
            if not shard.samples and not self._stand_in:
                return
            yield shard


def _ignore(_: bool) -> None:
    """Nobody wants to know."""


def _as_it_is(packet: T) -> T:
    return packet


def _is_iterable(dataset: Any) -> bool:
    """Whether the data set has elements to iterate, rather than items to index."""
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__"):
        return False
    if not isinstance(dataset, Iterable):
        raise TypeError(f"{type(dataset).__name__} is no data set: it needs __getitem__ and __len__, or __iter__")
    if isinstance(dataset, Iterator):
        raise TypeError(
            f"{type(dataset).__name__} can be iterated only once, but each epoch needs its elements: "
            "pass an object with __iter__, not a generator"
        )
    return True


def _length(dataset: Any) -> int | None:
    return len(dataset) if isinstance(dataset, Sized) else None


def _steps(dataset: Any, position: EpochPosition, drop_last: bool) -> int:
    """Global batches of an iterable data set."""
    if not isinstance(dataset, Sized):
        raise TypeError(f"{type(dataset).__name__} has no __len__: the number of steps is not known")
    size = position.global_batch_size
    return (len(dataset) + (0 if drop_last else size - 1)) // size


def _global_batch_size(batch_size: int | None, global_batch_size: int | None, world_size: int) -> int:
    """The samples of a step over all ranks together, from the one of the two sizes that is given."""
    _at_most_one(batch_size=batch_size, global_batch_size=global_batch_size)
    if batch_size is not None:
        return check_positive("batch_size", batch_size) * world_size
    if global_batch_size is None:
        raise ValueError("pass batch_size, for one rank, or global_batch_size, for all ranks together")
    if check_positive("global_batch_size", global_batch_size) < world_size:
        warnings.warn(
            f"global_batch_size={global_batch_size} is smaller than the {world_size} ranks: "
            f"{world_size - global_batch_size} of them never get a sample; use fewer ranks or larger batches",
            stacklevel=3,
        )
    return global_batch_size


def _at_most_one(**options: Any) -> None:
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other: pass one of them")
