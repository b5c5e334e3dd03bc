"""A sampler whose ranks may change in the middle of an epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized

from torch.utils.data import Sampler

from paceline.horovod.common.process import rank, size
from paceline.train.torch_types import StateDict


class ElasticSampler(Sampler[int]):
    """Shares out the samples that were not processed in this epoch.

    Put it into the `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end of each epoch. The
    last samples are repeated so that all ranks get as many.

    Args:
        dataset: whose samples; only its length matters.
        shuffle: whether their order is random.
        seed: of the order, the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: no sample has been processed in it."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed a batch."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> StateDict:
        """The position in the epoch."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Return to a position, with the ranks there are now."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share out the remaining samples among the ranks there are now."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        indices = list(self.remaining_indices)
        while indices and len(indices) < self.total_size:
            indices += indices[: self.total_size - len(indices)]
        return iter(indices[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
