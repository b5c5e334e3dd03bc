"""Which samples of an epoch a rank trains on, for any number of ranks and from any position.

The position of training has two numbers: the epoch, and the number of samples of the epoch that all ranks together have
consumed. A global batch is the samples from a position on, split over the ranks; nothing else depends on the number of
ranks. So another number of ranks can continue from any position, and every sample of the epoch is still used exactly
once.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from paceline.train.torch_types import StateDict

from .permutation import Order, Permutation, Sequential, WeightedDraws, WeightedPermutation
from .random_state import RandomStream, derive_seed

# The position of training: epoch, position, state of the data set, whether the epoch is over, batches.
Mark = tuple[int, int, Any, bool, int]
LOOKAHEAD = 4096  # positions that are mapped to indices in one call


@dataclass(slots=True)  # one per batch: frozen ones take three times as long to make
class Shard:
    """One rank's part of one global batch."""

    indices: list[Any]  # of the samples to read; rank 0's first one if this rank has no sample of its own
    samples: int  # number of samples that count; 0 if this rank has no sample of its own
    total: int  # samples of the global batch, over all ranks
    epoch: int
    first: int  # position of the shard's first sample in the epoch's order
    end: int  # position after the global batch
    is_last: bool = False  # whether the epoch ends with the global batch; False if that is not known
    stream: Any = field(default=None, repr=False)  # an iterable data set's state after it, if it has one and goes on


def share(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int, int]:
    """The part of the global batch at positions start to stop - 1 that is `rank`'s, and how many of its samples count.

    Shares are contiguous and in rank order, and their sizes differ by at most one. If a rank's share is empty, it gets
    rank 0's first sample as a stand-in, which does not count.
    """
    size, extra = divmod(stop - start, world_size)
    low = start + rank * size + min(rank, extra)
    samples = size + (rank < extra)
    return (low, low + samples, samples) if samples else (start, start + 1, 0)


class EpochPosition:
    """The position of training: the epoch, and how many of its samples all ranks together have consumed."""

    def __init__(self, *, order: str, seed: int, size: int | None, global_batch_size: int = 0) -> None:
        self.global_batch_size = global_batch_size
        self.epoch = 0
        self.position = 0
        self.stream: Any = None  # state of an iterable data set at this position, if it has one
        self.is_over = False  # whether the epoch is known to be over
        self.batches = 0  # consumed batches of the epoch
        # Whether to read one element ahead of users' samplers and data sets, to know an epoch's last batch as such.
        self.looks_ahead = False
        self._order_name = order
        self._seed = seed
        self._size = size

    def advance(self, shard: Shard) -> None:
        """Count the global batch of `shard` as consumed."""
        self.epoch, self.position, self.stream, self.is_over = shard.epoch, shard.end, shard.stream, shard.is_last
        self.batches += 1

    def rewind(self) -> None:
        self.position, self.stream, self.is_over, self.batches = 0, None, False, 0

    def end_epoch(self) -> None:
        self.epoch += 1
        self.rewind()

    def remaining(self, shard: Shard) -> int | None:
        """Samples of the epoch that come after the global batch of `shard`; None if that is not known."""
        return None

    @property
    def per_step(self) -> int:
        """What `position` counts in a full step: samples, or batches of the user's."""
        return self.global_batch_size

    def mark(self) -> Mark:
        return self.epoch, self.position, self.stream, self.is_over, self.batches

    def go_back(self, mark: Mark) -> None:
        self.epoch, self.position, self.stream, self.is_over, self.batches = mark

    def state_dict(self) -> StateDict:
        """The epoch, the position, and the settings that they depend on; the same on every rank, O(1)."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "stream": self.stream,
            "is_over": self.is_over,
            "batches": self.batches,
            "order": self._order_name,
            "seed": self._seed,
            "dataset_size": self._size,
            "global_batch_size": self.global_batch_size,
        }

    def load_state_dict(self, state: StateDict) -> None:
        for key, now in self.state_dict().items():
            if key in ("order", "seed", "dataset_size") and state[key] != now:
                raise ValueError(
                    f"cannot resume: the checkpoint was made with {key}={state[key]!r}, now it is {now!r}; "
                    f"go back to {state[key]!r}, or start again without the checkpoint"
                )
        self.go_back((state["epoch"], state["position"], state["stream"], state["is_over"], state["batches"]))


class ShardedSampler(EpochPosition, ABC):
    """Splits each epoch's samples over the ranks.

    Iterating yields this rank's shards from the current position to the end of the epoch, and counts each as consumed
    when it is yielded. The next iteration is the next epoch, without a call in between. All ranks get the same number
    of shards.
    """

    def __init__(
        self, *, order: str, seed: int, size: int | None, global_batch_size: int, rank: int, world_size: int
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}: ranks are 0 to world_size - 1")
        super().__init__(order=order, seed=seed, size=size, global_batch_size=global_batch_size)
        self._rank = rank
        self._world_size = world_size

    def __iter__(self) -> Iterator[Shard]:
        for shard in self._shards():
            self.advance(shard)
            yield shard
        self.end_epoch()

    @abstractmethod
    def __len__(self) -> int:
        """Global batches of a whole epoch."""

    @property
    def weights(self) -> Tensor | None:
        """Weights of the samples, float64 of shape (size,), if they are drawn by weight."""
        return None

    def own_samples(self) -> int:
        """Number of this rank's samples in a whole epoch."""
        raise TypeError(f"with a {self._order_name} the number of this rank's samples is not known")

    @abstractmethod
    def _shards(self) -> Iterator[Shard]:
        """This rank's shards, from the current position to the end of the epoch."""

    def ahead(self) -> ShardedSampler:
        """A copy that starts from the same position, for reading ahead of training."""
        return copy.copy(self)


class ElasticSampler(ShardedSampler):
    """Splits global batches of a map-style data set over ranks; each sample of an epoch is used exactly once.

    The k-th global batch of an epoch is the samples at positions k * G to (k + 1) * G - 1 of its order, whatever the
    number of ranks. The last one may be smaller, and then some ranks may have no sample. Nothing is padded. Except with
    `weights`, memory and the time to the first index, also after `load_state_dict`, do not grow with the data set.
    """

    def __init__(
        self,
        size: int,
        *,
        global_batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        weights: Tensor | Iterable[float] | None = None,
        replacement: bool = True,
        num_samples: int | None = None,
    ) -> None:
        name = "weighted" if weights is not None else "shuffled" if shuffle else "sequential"
        check_positive("global_batch_size", global_batch_size)
        super().__init__(
            order=name, seed=seed, size=size, global_batch_size=global_batch_size, rank=rank, world_size=world_size
        )
        if size < 1:
            raise ValueError("the data set is empty: there is nothing to sample")
        self._drop_last = drop_last
        self._epoch_size = size
        self._weights: Tensor | None = None
        self._replacement = replacement
        if weights is not None:
            self._epoch_size = size if num_samples is None else check_positive("num_samples", num_samples)
            self._weights = _check_weights(weights, size, None if replacement else self._epoch_size)
            if replacement:
                self._weights = self._weights.cumsum(0)
        elif num_samples is not None:
            raise ValueError("num_samples counts weighted draws: pass weights as well, or leave it out")

    def __len__(self) -> int:
        rest = 0 if self._drop_last else self.global_batch_size - 1
        return (self._epoch_size + rest) // self.global_batch_size

    def remaining(self, shard: Shard) -> int | None:
        rest = self._epoch_size - shard.end
        return rest - rest % self.global_batch_size if self._drop_last else rest

    @property
    def weights(self) -> Tensor | None:
        return self._weights

    def own_samples(self) -> int:
        whole, rest = divmod(self._epoch_size, self.global_batch_size)
        parts = [(self.global_batch_size, whole), (0 if self._drop_last else rest, 1)]
        return sum(share(0, size, self._rank, self._world_size)[2] * number for size, number in parts)

    def _order(self) -> Order:
        if self._weights is not None:
            weighted = WeightedDraws if self._replacement else WeightedPermutation
            return weighted(self._weights, self._seed, self.epoch)
        if self._order_name == "sequential":
            return Sequential()
        return Permutation(self._size or 0, self._seed, self.epoch)

    def _shards(self) -> Iterator[Shard]:
        epoch, order, size = self.epoch, self._order(), self.global_batch_size
        ahead = max(1, LOOKAHEAD * self._world_size // size)
        starts = range(self.position, self._epoch_size - (size - 1 if self._drop_last else 0), size)
        for block in range(0, len(starts), ahead):
            bounds = [(start, min(start + size, self._epoch_size)) for start in starts[block : block + ahead]]
            shares = [share(*bound, self._rank, self._world_size) for bound in bounds]
            positions = torch.cat([torch.arange(low, high) for low, high, _ in shares])
            indices = iter(order.at(positions).tolist())
            for (start, stop), (low, high, samples) in zip(bounds, shares, strict=True):
                taken = list(itertools.islice(indices, high - low))
                yield Shard(taken, samples, stop - start, epoch, low, stop, start == starts[-1])


class UserSampler(ShardedSampler):
    """Splits the indices of a user's own sampler over ranks, by their position; each is used exactly once.

    Every rank iterates over the whole sampler, so it must give the same order on all ranks. While the sampler runs, the
    global random generators of Python, torch and numpy are seeded with (seed, epoch), and so is its attribute
    `generator` if it has one; its `set_epoch` is called if it has one. A sampler that draws its order in another way
    must itself give the same order on all ranks. Resuming skips indices, which takes time but reads no data.
    """

    order = "sampler"

    def __init__(
        self,
        sampler: Iterable[Any],
        *,
        size: int | None,
        global_batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            order=self.order,
            seed=seed,
            size=size,
            global_batch_size=global_batch_size,
            rank=rank,
            world_size=world_size,
        )
        if isinstance(sampler, DistributedSampler):
            raise ValueError(
                "a DistributedSampler shards over ranks, which happens here anyway: leave it out, and pass shuffle=True"
            )
        if isinstance(sampler, Iterator):
            raise TypeError(
                f"the {self.order} can be iterated only once, but each epoch needs an order: pass an object with "
                "__iter__, not a generator"
            )
        self._sampler = sampler
        self._drop_last = drop_last

    def __len__(self) -> int:
        if not isinstance(self._sampler, Sized):
            raise TypeError(f"the {self.order} has no length: the number of steps is not known")
        rest = 0 if self._drop_last else self.per_step - 1
        return (len(self._sampler) + rest) // self.per_step

    def remaining(self, shard: Shard) -> int | None:
        if not isinstance(self._sampler, Sized):
            return None
        rest = len(self._sampler) - shard.end
        return rest - rest % self.per_step if self._drop_last else rest

    def _groups(self) -> Iterator[tuple[list[Any], bool]]:
        """The elements that all ranks together take from the sampler in each step, from the current position on."""
        epoch_seed = derive_seed(self._seed, self.epoch)
        stream = RandomStream()
        if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
            set_epoch(self.epoch)
        if isinstance(generator := getattr(self._sampler, "generator", None), torch.Generator):
            generator.manual_seed(epoch_seed)
        with stream.active(epoch_seed, continued=True):
            indices = iter(self._sampler)
            next(itertools.islice(indices, self.position, self.position), None)

        def read() -> list[Any]:
            with stream.active(continued=True):
                group = list(itertools.islice(indices, self.per_step))
            return [] if self._drop_last and len(group) < self.per_step else group

        group = read()
        while group:
            following = read() if self.looks_ahead else None
            yield group, following == []
            group = read() if following is None else following

    def _shards(self) -> Iterator[Shard]:
        epoch, start = self.epoch, self.position
        for group, is_last in self._groups():
            low, high, samples = share(0, len(group), self._rank, self._world_size)
            end = start + len(group)
            yield Shard(group[low:high], samples, len(group), epoch, start + low, end, is_last)
            start = end


class UserBatchSampler(UserSampler):
    """Divides each batch of a user's own batch sampler among the ranks; each batch is used exactly once.

    The position counts batches instead of samples. Everything else is as in `UserSampler`.
    """

    order = "batch_sampler"

    def __init__(
        self,
        batch_sampler: Iterable[list[Any]],
        *,
        size: int | None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        split: bool = True,
    ) -> None:
        super().__init__(batch_sampler, size=size, global_batch_size=0, seed=seed, rank=rank, world_size=world_size)
        self._split = split

    @property
    def per_step(self) -> int:
        return 1 if self._split else self._world_size

    def remaining(self, shard: Shard) -> int | None:
        """See `EpochPosition.remaining`; batches may differ in size."""
        return None

    def _shards(self) -> Iterator[Shard]:
        epoch, start = self.epoch, self.position
        for batches, is_last in self._groups():
            end = start + len(batches)
            if self._split:
                (batch,) = map(list, batches)
                low, high, samples = share(0, len(batch), self._rank, self._world_size)
                yield Shard(batch[low:high], samples, len(batch), epoch, start, end, is_last)
            else:
                low, _, own = share(0, len(batches), self._rank, self._world_size)
                batch = list(batches[low])
                total = sum(len(other) for other in batches)
                yield Shard(batch, len(batch) if own else 0, total, epoch, start + low, end, is_last)
            start = end


def check_positive(name: str, value: int) -> int:
    """`value`, if it is a whole number of at least 1."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
    return value


def _check_weights(weights: Tensor | Iterable[float], size: int, distinct: int | None) -> Tensor:
    """The weights as float64 of shape (size,); `distinct` of them must be positive, one if None."""
    tensor = torch.as_tensor(weights if isinstance(weights, Tensor) else list(weights), dtype=torch.float64).cpu()
    if tensor.shape != (size,):
        raise ValueError(f"weights must be one number per sample, {size} in all; their shape is {tuple(tensor.shape)}")
    if not (tensor.isfinite() & (tensor >= 0)).all():
        raise ValueError("weights must be finite and not negative")
    positive = int((tensor > 0).sum())
    if positive < (distinct or 1):
        raise ValueError(
            f"only {positive} samples have a positive weight, {distinct or 1} are needed: pass a smaller num_samples, "
            "or replacement=True"
        )
    return tensor
