"""What loaders do together with those of the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks of a job; each method is called by all of them, in the same order."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """What rank `source` passes."""

    def gather_objects(self, value: T) -> list[T]:
        """What every rank passes, in rank order."""

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to sum a tensor over all ranks in place; returns what waits for the sum."""
