"""Horovod's basics: starting, queries, and the class that has them as methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.horovod.engine.negotiation import OP_NAMES

from . import process
from . import process_sets as sets
from .process import *  # noqa: F403

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .process_sets import ProcessSet

__all__ = ["init", *process.__all__]  # noqa: PLE0604


def init(
    comm: Sequence[int] | Any | None = None, process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None
) -> None:
    """Join the other ranks, whichever launcher started them. If that was done before, nothing happens.

    Args:
        comm: the ranks that take part, numbered in this order, or a communicator of mpi4py; all by default.
        process_sets: process sets to add, the same on all ranks. "dynamic" adds none: they can always be added later.

    Raises:
        ValueError: this rank is not in `comm`, MPI does not connect all ranks, or a HOROVOD_* variable is malformed.
        paceline.Disagreement: this rank and rank 0 were started differently.
        paceline.NotConnected: a rank does not reach rank 0.
    """
    with process.lock:
        size = process.begin(comm)
        if size is None:
            return
        sets.begin(size)
    if process_sets is not None and not isinstance(process_sets, str):
        for wanted in process_sets:
            sets.add_or_find(wanted)


class HorovodBasics:
    """The functions of this module as methods, as in Horovod.

    Args:
        args: accepted: where Horovod's library would be.
    """

    def __init__(self, *args: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name in __all__:
            return globals()[name]
        if name in OP_NAMES:
            return OP_NAMES.index(name)
        raise AttributeError(f"HorovodBasics has no attribute {name!r}")
