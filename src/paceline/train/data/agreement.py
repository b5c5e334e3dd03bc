"""Checks, at the first batch, that all ranks have made their loaders from the same data."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, Sampler

from .content import DEEPEST, Content, is_sliced

if TYPE_CHECKING:
    from paceline.train.group.group import Group

    from .loader import Loader


_PARTS = 64  # data sets or tensors in a list, of which each is compared


class DataMismatch(RuntimeError):
    """The ranks have made a loader from different data, or with different options."""

    __module__ = "paceline"  # where users find it


@dataclass
class Description:
    """The data and options that a rank has made a loader from."""

    what: str  # the data set, as messages name it
    settings: dict[str, object]  # options and lengths that must be the same on all ranks
    contents: dict[str, Content]  # of the data set, the sampler and the weights, by their names

    @classmethod
    def of(cls, loader: Loader) -> Description:
        """Describe this rank's loader. Reads no sample of a data set that computes its samples."""
        settings = {"length": _length(loader.dataset), **loader.settings()}
        contents: dict[str, Content] = {}
        for name, thing in loader.made_of.items():
            for path, value in _held(thing, name, 0):
                contents[path] = Content()
                contents[path].add(value)
        return cls(_describe(loader.dataset), settings, contents)

    def difference(self, first: Description) -> str:
        """How this rank's loader differs from rank 0's, which is `first`; "" if it does not."""
        if self.what != first.what and type(self.settings["length"]) is type(first.settings["length"]):
            return f"has {self.what}"
        for name, value in self.settings.items():
            if value != first.settings[name]:
                return f"has {name} {value!r} and not {first.settings[name]!r}"
        for name in sorted({*self.contents, *first.contents}):
            mine, theirs = self.contents.get(name), first.contents.get(name)
            if mine is None or theirs is None or not mine.agrees(theirs):
                return f"has other {name}"
        return ""


@dataclass
class _Made:
    """A loader that was not compared yet; `where` is the line of the script that made it."""

    loader: Loader
    where: str
    evaluation: bool


class SameData:
    """Compares the data and options of the loaders of all ranks.

    At the first batch of a training loader, all loaders that were made before are compared. If there are only loaders
    for evaluation, that happens at the first batch of one of them. Later batches cost nothing.
    """

    def __init__(self, ranks: Group) -> None:
        self._ranks = ranks
        self._new: list[_Made] = []
        self._trains = False

    def add(self, loader: Loader, where: str, *, evaluation: bool) -> None:
        """Add a loader, which is compared at its first batch or before."""
        if self._ranks.world_size == 1:
            return
        made = _Made(loader, where, evaluation)
        self._new.append(made)
        self._trains = self._trains or not evaluation
        loader.on_begin = functools.partial(self._begin, made)

    def _begin(self, made: _Made) -> None:
        made.loader.on_begin = lambda: None  # there is nothing left to compare
        if any(each is made for each in self._new) and not (made.evaluation and self._trains):
            self.compare()

    def compare(self) -> None:
        """Compare the loaders made since the last time; a collective of all ranks."""
        new, self._new = self._new, []
        kinds = [[made for made in new if made.evaluation is kind] for kind in (False, True)]
        mine = [[Description.of(made.loader) for made in kind] for kind in kinds]
        first = self._ranks.broadcast_object(mine)
        found = self._ranks.gather_objects(self._difference(mine, first))
        if not (differing := {rank: difference for rank, difference in enumerate(found) if difference is not None}):
            return
        # The first loader that differs, and all ranks on which it differs in the same way.
        _, (kind, number, how) = min(differing.items(), key=lambda item: (item[1][:2], item[0]))
        ranks = [rank for rank, difference in differing.items() if difference == (kind, number, how)]
        where = f" ({kinds[kind][number].where})" if number < len(kinds[kind]) else ""
        what = first[kind][number].what if number < len(first[kind]) else "fewer loaders"
        raise DataMismatch(
            f"the ranks' data differs in a run.dataloader{where}: rank 0 has {what}, {_in_row(ranks)} {how}; "
            "split or shuffle data before run.setup and the first loader, or with the same seed on all ranks "
            "(generator=torch.Generator().manual_seed(0), random_state=0)"
        )

    @staticmethod
    def _difference(mine: list[list[Description]], first: list[list[Description]]) -> tuple[int, int, str] | None:
        """The first loader that is not like rank 0's: its kind and number, and how it differs."""
        for kind, (own, others) in enumerate(zip(mine, first, strict=True)):
            for number, (one, other) in enumerate(zip(own, others, strict=False)):
                if how := one.difference(other):
                    return kind, number, how
            if kind == 0 and len(own) != len(others):  # only some ranks may make loaders for evaluation
                return kind, min(len(own), len(others)), f"has made {len(own)} and not {len(others)} training loaders"
        return None


def checksum(**things: Any) -> int:
    """A checksum of data sets and samplers, by their names: of what they hold, and of their plain attributes."""
    total = Content()
    for name, thing in things.items():
        total.add([_describe(thing), *(value for pair in _held(thing, name, 0) for value in pair)])
        total.add([it for it in sorted(vars(thing).items()) if isinstance(it[1], int | str | None)])
    return total.total


def _held(thing: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """The first and last elements of all that a data set or sampler holds, with names; no sample is read."""
    if depth < DEEPEST and (parts := _parts(thing)):
        for key, part in parts:
            yield from _held(part, f"{name}[{key!r}]", depth + 1)
    elif is_sliced(thing):  # a slice with this step has the first and the last one
        yield name, getattr(thing, "iloc", thing)[:: max(1, len(thing) - 1)]
    elif isinstance(thing, Mapping):
        items = list(thing.items())
        yield name, [*items[:1], *items[-1:]]
    elif depth < DEEPEST and _has_elements(thing):
        own, length = type(thing).__module__.startswith("torch."), _length(thing)
        for attribute, value in sorted(vars(thing).items()):
            path = f"{name}.{attribute}"
            # Other lists may be anything: the samples read last, devices, a rank's own state.
            if own or length in (None, _length(value)) or _parts(value) or _has_elements(value):
                yield from _held(value, path, depth + 1)
            elif isinstance(value, Mapping):
                for key, column in value.items():
                    if length == _length(column):
                        yield from _held(column, f"{path}[{key!r}]", depth + 1)


def _parts(thing: Any) -> list[tuple[Any, Any]]:
    """The data sets, samplers or tensors of a short list or mapping that has nothing else."""
    if not isinstance(thing, list | tuple | Mapping) or len(thing) > _PARTS:
        return []
    items = list(thing.items() if isinstance(thing, Mapping) else enumerate(thing))
    return items if all(isinstance(part, Dataset | Sampler | torch.Tensor) for _, part in items) else []


def _has_elements(thing: Any) -> bool:
    """Whether something is a data set or a sampler, whose attributes may be data."""
    has_items = isinstance(thing, Sized) and hasattr(type(thing), "__getitem__") and not isinstance(thing, str | bytes)
    return (isinstance(thing, Dataset | Sampler) or has_items) and hasattr(thing, "__dict__")


def _describe(dataset: Any) -> str:
    inner = getattr(dataset, "dataset", None)
    kind = type(dataset).__name__ + (f" of {type(inner).__name__}" if inner is not None else "")
    length = _length(dataset)
    return f"{kind}, {length} samples" if length is not None else kind


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def _in_row(ranks: Sequence[int]) -> str:
    few = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {few}" if len(ranks) == 1 else f"ranks {few}"
