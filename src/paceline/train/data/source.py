"""An iterable data set of a user: iterated from its beginning or from its saved state, or read by index."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, overload

from torch.utils.data import Dataset, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from .content import Content
from .random_state import RandomStream

_TRIED = 3  # elements that are read in both ways, to compare them


class Source:
    """A data set and its state, where it has `state_dict` and `load_state_dict`."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.is_stateful = hasattr(dataset, "load_state_dict") and hasattr(dataset, "state_dict")
        self._first_state: Any = None  # before the first iteration in this process
        self._epoch_state: Any = None  # before the first part of the current epoch
        self._is_within = False  # whether an iteration is under way
        self._is_doubtful = False  # whether the data set may be at its end instead of at its beginning

    def set_epoch(self, epoch: int) -> None:
        """Call the data set's `set_epoch`, if it has one."""
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)

    def begin(self, position: int, state: Any, *, another_part: bool = False) -> int:
        """Bring the data set to its saved `state`, or to its beginning. Returns the position there."""
        if not self.is_stateful:
            return 0
        if self._first_state is None:
            self._first_state = self.state()
        if not another_part:
            if self._is_within and state is None:
                self.dataset.load_state_dict(copy.deepcopy(self._first_state))
            self._epoch_state = self._first_state if self._is_within else self.state()
        elif state is None:  # it may have stayed at the end of the other part
            self.dataset.load_state_dict(copy.deepcopy(self._epoch_state))
        if state is not None:
            self.dataset.load_state_dict(copy.deepcopy(state))
        self._is_doubtful = another_part and state is None
        self._is_within = True
        return 0 if state is None else position

    def elements(self) -> Iterator[Any]:
        """The elements from there on.

        A data set that begins anew in `__iter__`, unless a state was loaded, still had the state of its last end before
        the epoch. If this state was loaded, there is nothing to read, and the next iteration begins anew.
        """
        found: Iterator[Any] = iter(self.dataset)
        if not self._is_doubtful:
            return found
        first = list(itertools.islice(found, 1))
        return itertools.chain(first, found) if first else iter(self.dataset)

    def state(self) -> Any:
        return copy.deepcopy(self.dataset.state_dict())

    def end(self) -> None:
        """Note the end of the iteration, at which data sets may go back to their beginning."""
        self._is_within = False


class Indexed:
    """A data set that can be iterated, and whose elements can be read by index as well."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._random = RandomStream()
        self._agrees: bool | None = None

    @staticmethod
    def may_be(dataset: Any) -> bool:
        """Whether a data set has `__getitem__` and `__len__` of its own, and no state."""
        kind = type(dataset)
        return (
            isinstance(dataset, IterableDataset)
            and getattr(kind, "__getitem__", None) not in (None, Dataset.__getitem__)
            and hasattr(kind, "__len__")
            and not hasattr(dataset, "state_dict")
        )

    def __len__(self) -> int:
        return len(self._dataset)

    def is_iterated_in_order(self, seed: int) -> bool:
        """Whether iterating gives the elements in the order of their indices; determined once, from the first ones."""
        if self._agrees is None:
            with as_worker(None), self._random.active(seed):
                iterated = list(itertools.islice(iter(self._dataset), _TRIED))
            count = min(_TRIED, len(self))
            with as_worker(None), self._random.active(seed):
                read = [self._dataset[index] for index in range(count)]
            one, other = Content(), Content()
            one.add(iterated)
            other.add(read)
            self._agrees = count > 0 and one.agrees(other)
        return self._agrees

    def between(self, start: int, stop: int, seed: int) -> Sequence[Any]:
        """The elements `start` to `stop` - 1; a slice of them is read when it is taken."""
        return _Between(self._dataset, range(start, stop), self._random, seed)


class _Between(Sequence[Any]):
    """Elements that are read when they are taken."""

    def __init__(self, dataset: Any, indices: range, random: RandomStream, seed: int) -> None:
        self._dataset, self._indices, self._random, self._seed = dataset, indices, random, seed

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        chosen = self._indices[index]
        with as_worker(None), self._random.active(self._seed):
            if isinstance(chosen, range):
                return [self._dataset[each] for each in chosen]
            return self._dataset[chosen]


@contextlib.contextmanager
def as_worker(info: Any) -> Iterator[None]:
    """Let `torch.utils.data.get_worker_info()` return `info`; None is what it returns in the main process."""
    before = torch_worker._worker_info
    torch_worker._worker_info = info
    try:
        yield
    finally:
        torch_worker._worker_info = before
