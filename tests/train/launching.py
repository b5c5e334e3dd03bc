"""Ranks for the tests of the library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import paceline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


def launch(fn: Callable[..., T], args: Sequence[Any] = (), nproc: int = 1) -> list[T]:
    """`paceline.launch` by copies of this process: they need not import torch again, which takes seconds each."""
    import torch._dynamo  # noqa: F401 - optimizers and DistributedDataParallel import it when first made

    return paceline.launch(fn, args, nproc, method="fork")
