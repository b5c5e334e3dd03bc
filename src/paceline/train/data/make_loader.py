"""Building a loader from the options that scripts pass."""

from __future__ import annotations

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from paceline.contract.tuning import setting
from paceline.train.group.group import Group

from .loader import Loader
from .random_state import derive_seed
from .sampler import ElasticSampler, EpochPosition, Shard, ShardedSampler, UserBatchSampler, UserSampler, check_positive
from .split import Split
from .workers import Collate, MapFetch, StreamFetch

T = TypeVar("T")
_OF_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")  # without them, errors


def make_loader(
    dataset: Any,
    *,
    batch_size: int | None = None,
    global_batch_size: int | None = None,
    shuffle: bool | None = False,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    rank: int = 0,
    world_size: int = 1,
    ranks: Group | None = None,
    device: torch.device | str = "cpu",
    num_workers: int = 0,
    collate_fn: Collate | None = None,
    sampler: Iterable[Any] | None = None,
    batch_sampler: Iterable[list[Any]] | None = None,
    split_batches: bool | None = None,
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
    in_order: bool = True,
    split: bool = True,
) -> Loader:
    """Build the loader of a map-style or iterable data set.

    Options that are not described here are as in `torch.utils.data.DataLoader`.

    Args:
        dataset: with `__getitem__` and `__len__`, or with `__iter__`; see `StreamFetch` for what the latter must do.
        batch_size: samples per step and rank. The global batch size is this times the number of ranks of the first
            start; it stays the same when a checkpoint is resumed with another number of ranks, unless `batch_size` is
            another one, too.
        global_batch_size: samples per step of all ranks together; pass one of the two.
        shuffle: whether every epoch has a new random order, see `ElasticSampler`.
        seed: seed of the order and of random augmentation, the same on every rank; 0 if None.
        generator: its seed (`initial_seed()`) is used instead; how much was drawn from it makes no difference.
        rank: this rank.
        world_size: number of ranks.
        ranks: the collectives of the ranks; without them, a stream is not split over the ranks.
        device: where batches go.
        sampler: the user's own order, see `UserSampler`.
        batch_sampler: the user's own batches, see `UserBatchSampler`.
        split_batches: whether each of these is divided among the ranks, so that the number of steps does not depend on
            that of ranks; the default. If False, each rank gets a whole one per step.
        weights: one number per sample, for weighted draws, see `ElasticSampler`.
        replacement: whether weighted draws may repeat a sample within an epoch.
        num_samples: weighted draws per epoch; the length of the data set if None.
        drop_last: leave out the last global batch of an epoch if it is smaller.
        evaluation: every iteration starts with the first sample, and draws the same random numbers; ranks without a
            sample stop early.
        pin_memory: copy batches to pinned memory first; None means only for GPUs.
        in_order: if False, the batches of an evaluation come in the order in which workers finish them. In training
            they always come in order, since otherwise a resume could not tell which of them were used.
        split: if False, each process reads the whole stream, even if its code looks as if it could be split.

    Raises:
        TypeError: the data set has neither items with a length nor elements, or can be iterated only once.
        ValueError: a number is out of range, or options exclude each other.
    """
    if isinstance(dataset, DataLoader):
        raise TypeError("this is a DataLoader, which makes batches itself; pass its data set, loader.dataset")
    orders = {"sampler": sampler, "batch_sampler": batch_sampler, "weights": weights, "shuffle": shuffle or None}
    _at_most_one(**orders)
    _at_most_one(seed=seed, generator=generator)
    seed = generator.initial_seed() if generator is not None else seed or 0
    target = torch.device(device)
    build = functools.partial(
        DataLoader[Any],
        num_workers=num_workers,
        collate_fn=_as_it_is,  # the data set collates
        pin_memory=target.type == "cuda" if pin_memory is None else pin_memory,
        timeout=timeout,
        worker_init_fn=worker_init_fn,
        multiprocessing_context=multiprocessing_context,
        # Otherwise each iteration draws from the global generator, and a resumed run would draw once more.
        generator=torch.Generator().manual_seed(derive_seed(seed, rank)),
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
        in_order=in_order or not evaluation,
    )
    loader = functools.partial(
        Loader,
        dataset,
        rank=rank,
        world_size=world_size,
        ranks=ranks,
        device=target,
        evaluation=evaluation,
        batch_size=batch_size,
        batch_sampler=batch_sampler,
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
    if split_batches is not None and batch_sampler is None:
        raise ValueError("split_batches is for the batches of a batch_sampler: pass one, or leave it out")
    if _is_iterable(dataset):
        _at_most_one(iterable_dataset=dataset, **orders)
        stream = StreamFetch(dataset, collate, evaluation=evaluation, **sharding)
        position = EpochPosition(order="iterable", seed=seed, size=_length(dataset), global_batch_size=size)
        steps = functools.partial(_steps, dataset, position, drop_last)
        parts = Split(
            dataset,
            rank=rank,
            world_size=world_size,
            workers=num_workers,
            ranks=ranks,
            evaluation=evaluation,
            allowed=split,
        )
        return loader(
            position,
            lambda: build(stream, batch_size=None),
            steps=steps,
            stream=stream,
            split=parts,
            sampler=None,
            made_of={"data set": dataset},
        )
    draws = {"weights": weights, "replacement": replacement, "num_samples": num_samples}
    if batch_sampler is None:
        sharding |= {"global_batch_size": size}
    else:
        sharding |= {"split": split_batches is not False}
    shards = _sampler(dataset, sampler, batch_sampler, {"shuffle": shuffle, **draws}, sharding)
    fetch, plan = MapFetch(dataset, collate, seed), _Plan(shards, stand_in=not evaluation)
    batches: Any = plan  # the DataLoader passes on whatever its batch sampler yields
    given = {"data set": dataset, "sampler": sampler, "batch sampler": batch_sampler, "weights": shards.weights}
    return loader(
        shards,
        lambda: build(fetch, batch_sampler=batches),
        steps=shards.__len__,
        stream=None,
        split=None,
        sampler=sampler if sampler is not None else OwnSamples(shards),
        made_of={name: thing for name, thing in given.items() if thing is not None},
    )


def check_options(options: Iterable[str]) -> None:
    """Check that `make_loader` has the options that a script passes to `run.dataloader`."""
    known = inspect.signature(make_loader).parameters
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise TypeError(f"run.dataloader has no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def tuned(
    batch_size: int | None, options: dict[str, Any], env: Mapping[str, str], *, evaluation: bool
) -> tuple[int | None, dict[str, Any]]:
    """The batch size and the options of a loader, with what the environment says in their place.

    The batch size of an evaluation, and that of a batch sampler, stay.
    """
    options = dict(options)
    workers, prefetch, pins = (setting(name, env) for name in ("workers", "prefetch", "pin_memory"))
    if workers is not None:
        options["num_workers"] = int(workers)
        for name in _OF_WORKERS if int(workers) == 0 else ():
            options.pop(name, None)
    if prefetch is not None and options.get("num_workers"):
        options["prefetch_factor"] = int(prefetch)
    if pins is not None:
        options["pin_memory"] = pins == "1"
    if not evaluation and options.get("batch_sampler") is None and (size := setting("batch_size", env)) is not None:
        options.pop("global_batch_size", None)
        batch_size = int(size)
    return batch_size, options


def _sampler(
    dataset: Any,
    sampler: Iterable[Any] | None,
    batch_sampler: Iterable[list[Any]] | None,
    order: dict[str, Any],
    sharding: dict[str, Any],
) -> ShardedSampler:
    size = _length(dataset)
    if batch_sampler is not None:
        return UserBatchSampler(batch_sampler, size=size, **sharding)
    if sampler is not None:
        return UserSampler(sampler, size=size, **sharding)
    if size is None:
        raise TypeError(f"{type(dataset).__name__} has no __len__: add it, or pass a sampler")
    return ElasticSampler(size, **order, **sharding)


class _Plan:
    """The batch sampler of the DataLoader: reads ahead of training, with a position of its own."""

    def __init__(self, sampler: ShardedSampler, *, stand_in: bool) -> None:
        self._sampler = sampler
        self._stand_in = stand_in

    def __iter__(self) -> Iterator[Shard]:
        for shard in self._sampler.ahead():
            if not shard.samples and not self._stand_in:
                return
            yield shard


class OwnSamples:
    """This rank's samples, in place of a `torch.utils.data.DistributedSampler`, if the user passes no sampler."""

    def __init__(self, shards: ShardedSampler) -> None:
        self._shards = shards

    def __len__(self) -> int:
        """Number of this rank's samples per epoch, without stand-ins."""
        return self._shards.own_samples()

    def __iter__(self) -> Iterator[Any]:
        """This rank's indices from the current position to the end of the epoch."""
        for shard in self._shards.ahead():
            if shard.samples:
                yield from shard.indices

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: epochs advance by themselves. It exists for scripts that call it."""


def _as_it_is(packet: T) -> T:
    return packet


def _is_iterable(dataset: Any) -> bool:
    """Whether the data set has elements to iterate, rather than items to index."""
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__"):
        return False
    if not isinstance(dataset, Iterable):
        raise TypeError(f"{type(dataset).__name__} is not a data set: it needs __getitem__ and __len__, or __iter__")
    if isinstance(dataset, Iterator):
        raise TypeError(
            f"{type(dataset).__name__} can be iterated only once, but each epoch needs its elements: "
            "pass an object with __iter__, not a generator"
        )
    return True


def _length(dataset: Any) -> int | None:
    return len(dataset) if isinstance(dataset, Sized) else None


def _steps(dataset: Any, position: EpochPosition, drop_last: bool) -> int:
    if not isinstance(dataset, Sized):
        raise TypeError(f"{type(dataset).__name__} has no __len__: the number of steps is not known")
    size = position.global_batch_size
    return (len(dataset) + (0 if drop_last else size - 1)) // size


def _global_batch_size(batch_size: int | None, global_batch_size: int | None, world_size: int) -> int:
    """The samples per step of all ranks together, from whichever of the two sizes is given."""
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
