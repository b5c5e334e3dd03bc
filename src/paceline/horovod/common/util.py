"""Small helpers that scripts import from `horovod.common.util`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def is_iterable(value: object) -> bool:
    """Whether one can iterate over it."""
    return isinstance(value, Iterable)


def split_list(items: Sequence[T], parts: int) -> list[list[T]]:
    """Split a list into at most `parts` lists whose lengths differ by one at most; empty ones are left out."""
    each, odd = divmod(len(items), parts)
    bounds = [index * each + min(index, odd) for index in range(parts + 1)]
    made = [list(items[start:end]) for start, end in itertools.pairwise(bounds)]
    return [part for part in made if part]


def num_rank_is_power_2(count: int) -> bool:
    """Whether a number of ranks is a power of two."""
    return count > 0 and count & (count - 1) == 0


def gpu_available(*_: Any) -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()
