"""Streams in parts: which iterable data sets can be split, and which part is read by which rank and worker.

Every worker of every rank reads the whole stream unless it can be split: by `get_worker_info()`, with the parts as the
workers, or by a method `shard(num_shards, index)`. An epoch begins with as many parts as there are workers on
all ranks together. It keeps them if it is resumed with another number of ranks or workers. Each batch is of one part.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from torch.utils.data import IterableDataset, get_worker_info

_DEEPEST = 4  # data sets within data sets, and functions that call functions


@dataclass(frozen=True)
class Progress:
    """How far a part was read."""

    count: int = 0  # elements that were used
    is_done: bool = False  # whether the part is known to have no more elements
    state: Any = field(default=None, repr=False)  # of the data set after them, if it has one and there are more
    turn: int = -1  # the step that has used it last, so that parts take turns as they would have without a restart

    def at(self, turn: int) -> Progress:
        """A copy that was used in step `turn` of the epoch."""
        return Progress(self.count, self.is_done, self.state, turn)


class PlainParts(TypedDict):
    """`Parts`, as checkpoints have them: of each part what `Progress` has."""

    parts: int
    progress: dict[int, tuple[int, bool, Any, int]]


@dataclass(frozen=True)
class Parts:
    """The parts of an epoch and how far each was read; those not in `progress` were not begun."""

    count: int
    progress: Mapping[int, Progress] = field(default_factory=dict)

    def after(self, part: int, progress: Progress) -> Parts:
        """A copy in which this part has this progress."""
        return Parts(self.count, {**self.progress, part: progress})

    def of_rank(self, rank: int, world_size: int) -> list[tuple[int, Progress]]:
        """The parts that a rank has still to read, the one whose turn it is first."""
        all_of_them = ((part, self.progress.get(part, Progress())) for part in range(rank, self.count, world_size))
        return sorted((each for each in all_of_them if not each[1].is_done), key=lambda each: (each[1].turn, each[0]))

    def merged(self, others: list[Parts]) -> Parts:
        """The progress of all ranks together; each knows only its own parts."""
        latest: dict[int, Progress] = {}
        for parts in others:
            for part, progress in parts.progress.items():
                if part not in latest or latest[part].turn < progress.turn:
                    latest[part] = progress
        return Parts(self.count, latest)

    def to_plain(self) -> PlainParts:
        parts = {part: (each.count, each.is_done, each.state, each.turn) for part, each in self.progress.items()}
        return {"parts": self.count, "progress": parts}

    @classmethod
    def from_plain(cls, state: PlainParts) -> Parts:
        return cls(state["parts"], {part: Progress(*each) for part, each in state["progress"].items()})


def is_split_by_shard(dataset: Any) -> bool:
    """Whether a data set has `shard(num_shards, index)`, which returns a data set."""
    if not callable(shard := getattr(dataset, "shard", None)):
        return False
    try:
        return {"num_shards", "index"} <= set(inspect.signature(shard).parameters)
    except (TypeError, ValueError):  # not a Python function
        return False


def is_split_by_worker(dataset: Any) -> bool:
    """Whether a data set, or one that it reads, splits its elements over the workers from `get_worker_info`.

    It is concluded from the code of `__iter__` and of what it calls: that uses `get_worker_info` and `num_workers`, as
    it must to split anything, and does not ask for its rank. Whether it really asks for its worker is checked while it
    is read.
    """
    names = _names(dataset, 0)
    return {"get_worker_info", "num_workers"} <= names and "get_rank" not in names


def is_split_by_rank(dataset: Any) -> bool:
    """Whether the code of an iterable data set asks for the rank and the number of ranks."""
    return {"get_rank", "get_world_size"} <= _names(dataset, 0)


def parts_at_most(dataset: Any, wanted: int) -> int:
    """The number of parts: as many as wanted, or fewer if the data set says that it has fewer."""
    if not is_split_by_shard(dataset):
        return wanted
    has = getattr(dataset, "num_shards", None)
    return min(wanted, has) if isinstance(has, int) else wanted


def _names(dataset: Any, depth: int) -> set[str]:
    """The names used by `__iter__` of a data set, of the data sets that it reads, and by what they call."""
    found: set[str] = set()
    _follow(type(dataset), "__iter__", found, set())
    if depth < _DEEPEST:
        for value in getattr(dataset, "__dict__", {}).values():
            if isinstance(value, IterableDataset):
                found |= _names(value, depth + 1)
    return found


def _follow(kind: type, method: str, found: set[str], seen: set[Any]) -> None:
    """Add the names used by a method, by those that it may call, and by functions and classes of its module."""
    for owner in kind.__mro__:
        member = vars(owner).get(method)
        if member is None or owner.__module__.partition(".")[0] in ("torch", "builtins", "typing", "collections"):
            continue
        member = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
        function = inspect.unwrap(member) if callable(member) else None
        if isinstance(function, types.FunctionType):
            names = _follow_function(function, found, seen)
            for name in names - {method}:
                if (kind, name) not in seen:
                    seen.add((kind, name))
                    _follow(kind, name, found, seen)
            if "super" in names:
                continue
        return


def _follow_function(function: types.FunctionType, found: set[str], seen: set[Any]) -> set[str]:
    names: set[str] = set()
    if function.__code__ in seen:
        return names
    seen.add(function.__code__)
    for code in _codes(function.__code__):
        names.update(code.co_names)
    found |= names
    for name in sorted(names):
        value = function.__globals__.get(name)
        if value is get_worker_info:
            found.add("get_worker_info")
        elif getattr(value, "__module__", None) != function.__module__:
            continue
        elif isinstance(value, types.FunctionType):
            _follow_function(value, found, seen)
        elif isinstance(value, type):
            for method in ("__init__", "__iter__", "__next__"):
                _follow(value, method, found, seen)
    return names


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
