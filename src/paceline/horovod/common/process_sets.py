"""Process sets: subsets of the ranks that do collectives among themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from paceline.horovod.engine.entries import Entry
from paceline.horovod.engine.negotiation import Request

from . import process
from .util import is_iterable


class ProcessSet:
    """Some of the ranks. It can be used once it was given to `init` or `add_process_set`.

    Args:
        ranks_or_comm: global ranks, or a communicator of mpi4py.
    """

    process_set_id: int | None = None  # its number; None before it is added and after it is removed
    ranks: list[int] | None = None  # global ranks in ascending order
    mpi_comm: Any = None  # the communicator that it was made from

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        if is_iterable(ranks_or_comm):
            ranks = sorted(ranks_or_comm)
            if any(not isinstance(rank, int) for rank in ranks):
                raise ValueError(
                    "ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object"
                )
            self.ranks = ranks
        elif hasattr(ranks_or_comm, "allgather"):
            self.mpi_comm = ranks_or_comm
        else:
            raise ValueError("ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object")

    def size(self) -> int:
        """Number of its ranks.

        Raises:
            ValueError: it was not added.
        """
        return len(self._members())

    def rank(self) -> int | None:
        """Position of this rank in it; None if this rank does not belong to it.

        Raises:
            ValueError: it was not added.
        """
        members, mine = self._members(), process.rank()
        return members.index(mine) if mine in members else None

    def included(self) -> bool:
        """Whether this rank belongs to it.

        Raises:
            ValueError: it was not added.
        """
        return process.rank() in self._members()

    def invalidate(self) -> None:
        """Forget its number: it was removed, and can be added again."""
        self.process_set_id = None

    def _members(self) -> list[int]:
        process.state()
        if self.process_set_id is None or self.ranks is None:
            raise ValueError(f"{self} is not registered; give it to hvd.init() or hvd.add_process_set() first")
        return self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0

_known: dict[int, list[ProcessSet]] = {0: [global_process_set]}


def note(process_set: ProcessSet, number: int, ranks: list[int]) -> None:
    """A process set has this number now."""
    process_set.process_set_id, process_set.ranks = number, list(ranks)
    same = _known.setdefault(number, [])
    if not any(process_set is one for one in same):
        same.append(process_set)


def forget(number: int) -> None:
    """The process set of this number is gone."""
    for one in _known.pop(number, []):
        one.invalidate()


def begin(size: int) -> None:
    """Forget all but the global process set, to which all ranks belong."""
    for number in [number for number in _known if number]:
        forget(number)
    note(global_process_set, 0, list(range(size)))


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a process set, or one of these ranks. All ranks call this, with the same ranks.

    Raises:
        ValueError: there is one of the same ranks, or a rank does not exist.
        HorovodInternalError: the ranks want different process sets.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.ranks is None:
        raise NotImplementedError(
            "Dynamically adding process sets defined by an MPI communicator is not implemented. "
            "Please build the process set via a list of ranks."
        )
    wanted, size = tuple(sorted(process_set.ranks)), process.size()
    if not wanted or len(set(wanted)) != len(wanted) or wanted[0] < 0 or wanted[-1] >= size:
        raise ValueError(f"a process set of ranks {list(wanted)} is not one of different ranks of 0 … {size - 1}")
    if wanted in process.engine().sets.values():
        raise ValueError(f"A process set with ranks {list(wanted)} exists already")
    note(process_set, int(process.together("add_set", extra=wanted)), process_set.ranks)
    return process_set


def add_or_find(wanted: ProcessSet | Iterable[int]) -> None:
    """Add a process set that may be there already, or be made from a communicator."""
    process_set = wanted if isinstance(wanted, ProcessSet) else ProcessSet(wanted)
    pairs = [(process_set, process_set.ranks or [])]
    if process_set.mpi_comm is not None:
        process_set.ranks, mine = sorted(process_set.mpi_comm.allgather(process.rank())), process.rank()
        lists = _lists_of_all(process_set.ranks)
        pairs = [(process_set if mine in ranks else ProcessSet(ranks), ranks) for ranks in lists]
    for one, ranks in pairs:
        number = next((number for number, known in process.engine().sets.items() if list(known) == ranks), None)
        if number is None:
            add_process_set(one)
        else:
            note(one, number, ranks)


def _lists_of_all(ranks: list[int]) -> list[list[int]]:
    """The lists that the ranks pass, without repetitions."""
    lengths = _gathered([len(ranks)]).tolist()
    parts = torch.split(_gathered(ranks), lengths)
    return [list(one) for one in sorted({tuple(part.tolist()) for part in parts})]


def _gathered(numbers: list[int]) -> torch.Tensor:
    request = Request("allgather", process.unnamed("allgather", 0), 0, (("int64", (len(numbers),)),))
    outputs = process.submitted(Entry(request, [torch.tensor(numbers)])).outputs
    assert outputs is not None
    return outputs[0]


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. All ranks call this.

    Returns:
        Whether there was one; the global process set stays.
    """
    number = process_set.process_set_id
    if not number:
        return False
    is_removed = int(process.together("remove_set", extra=(number,))) >= 0
    forget(number)
    return is_removed


def process_set_by_id(process_set_id: int) -> ProcessSet:
    """The process set of a number.

    Raises:
        ValueError: there is none.
    """
    if process_set_id not in _known:
        raise ValueError(f"No known process set with id {process_set_id}")
    return _known[process_set_id][0]


def process_sets() -> list[ProcessSet]:
    """All process sets, by number."""
    return [_known[number][0] for number in sorted(_known)]
