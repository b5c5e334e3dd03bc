"""Process sets: subsets of the ranks that do collectives among themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .exceptions import NotInitialized
from .util import is_iterable


class ProcessSet:
    """Some of the ranks. It can be used once it was given to `init` or `add_process_set`.

    Args:
        ranks_or_comm: global ranks, or a communicator of mpi4py.

    Attributes:
        process_set_id: its number; None before it is added and after it is removed.
        ranks: global ranks in ascending order.
        mpi_comm: the communicator that it was made from.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

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
        members, mine = self._members(), _job().rank
        return members.index(mine) if mine in members else None

    def included(self) -> bool:
        """Whether this rank belongs to it.

        Raises:
            ValueError: it was not added.
        """
        return _job().rank in self._members()

    def invalidate(self) -> None:
        """Forget its number and ranks: it was removed."""
        self.process_set_id = None
        self.ranks = None
        self.mpi_comm = None

    def _members(self) -> list[int]:
        _job()
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


class Job(NamedTuple):
    """What `init` has made, as process sets need it.

    Attributes:
        rank: this rank.
        size: number of ranks.
        add: adds a process set of some ranks on all ranks; returns its number.
        remove: removes the one of a number on all ranks; returns whether there was one.
    """

    rank: int
    size: int
    add: Callable[[list[int]], int]
    remove: Callable[[int], bool]


_current: Job | None = None


def _job() -> Job:
    if _current is None:
        raise NotInitialized()
    return _current


def start(job: Job | None) -> None:
    """Begin with the global process set alone; without a job, Horovod was shut down."""
    global _current  # noqa: PLW0603 - as in Horovod, there is one state per process
    _current = job
    if job is None:
        return
    for number in [number for number in _known if number]:
        forget(number)
    note(global_process_set, 0, list(range(job.size)))


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
    number = _job().add(process_set.ranks)
    note(process_set, number, process_set.ranks)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. All ranks call this.

    Returns:
        Whether there was one; the global process set stays.
    """
    number = process_set.process_set_id
    if not number:
        return False
    is_removed = _job().remove(number)
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
