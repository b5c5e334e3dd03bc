"""Ranks for the tests of the library."""

from __future__ import annotations

import faulthandler
import functools
import gc
from typing import TYPE_CHECKING, Any, TypeVar

import paceline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

T = TypeVar("T")
_STUCK = 240.0  # seconds until a rank prints where it stands; less than a test may take


def launch(fn: Callable[..., T], args: Sequence[Any] = (), nproc: int = 1) -> list[T]:
    """`paceline.launch` by copies of this process: they need not import torch again, which takes seconds each."""
    import torch._dynamo  # noqa: F401 - optimizers and DistributedDataParallel import it when first made

    return paceline.launch(functools.partial(_watched, fn), args, nproc, method="fork")


def launch_each(fn: Callable[..., T], cases: Sequence[Sequence[Any]], nproc: int = 1) -> list[list[T]]:
    """For each of some arguments, what the ranks return; in one start of the ranks, since a start takes seconds."""
    return [list(each) for each in zip(*launch(_each, (fn, cases), nproc), strict=True)]


def _each(fn: Callable[..., T], cases: Sequence[Sequence[Any]]) -> list[T]:
    return [fn(*args) for args in cases]


def _watched(fn: Callable[..., T], *args: Any) -> T:
    gc.freeze()  # what came with the fork: going through all of pytest and torch takes half a second each time
    faulthandler.dump_traceback_later(_STUCK, file=2)
    try:
        return fn(*args)
    finally:
        faulthandler.cancel_dump_traceback_later()


def say(file: Path, text: str) -> None:
    """Write a file that others look for: it is there whole or not at all, also if this rank is ended meanwhile."""
    new = file.parent.with_name(f"{file.parent.name}-{file.name}.new")
    new.write_text(text)
    new.replace(file)
