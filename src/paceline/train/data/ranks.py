"""The collectives that loaders need."""

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
        """Number of ranks."""

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """Return the object that rank `source` passes."""

    def gather_objects(self, value: T) -> list[T]:
        """Return the objects of all ranks, in rank order."""

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to sum a tensor over all ranks, in place. Returns a function that waits for the sum."""
