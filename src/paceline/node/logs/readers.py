"""Several iterators read at once, each by its own thread."""

from __future__ import annotations

import contextlib
import heapq
import queue
import threading
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_KEPT = 64  # items that nobody has taken yet; then the readers wait

Key = TypeVar("Key")
Item = TypeVar("Item")
Timed = TypeVar("Timed", bound=Any)  # has an attempt and a time


class Ended(NamedTuple):
    """An iterator has ended, with this error or without one."""

    error: Exception | None


class Readers(Generic[Key, Item]):
    """What several iterators yield, in the order of arrival; those of one keep their order."""

    def __init__(self) -> None:
        self._news: queue.Queue[tuple[Key, Item | Ended]] = queue.Queue(_KEPT)
        self._lock = threading.Lock()
        self._open: list[Iterable[Item]] = []
        self.active = 0  # iterators whose end has not been taken
        self.is_closed = False

    def add(self, key: Key, items: Iterable[Item]) -> None:
        """Read another iterator from now on."""
        with self._lock:
            self.active += 1
            self._open.append(items)
        threading.Thread(target=self._read, args=(key, items), daemon=True).start()

    def put(self, key: Key, item: Item | Ended) -> None:
        """Insert an item as if the iterator of this key had yielded it."""
        if not self.is_closed:
            self._news.put((key, item))

    def _read(self, key: Key, items: Iterable[Item]) -> None:
        error = None
        try:
            for item in items:
                if self.is_closed:
                    return
                self.put(key, item)
        except Exception as caught:
            error = caught
        self.put(key, Ended(error))

    def take(self, seconds: float | None = None) -> tuple[Key, Item | Ended] | None:
        """The next item, or end, and its key; None when all iterators have ended."""
        if not self.active:
            return None
        try:
            found = self._news.get(timeout=None if seconds is None else max(0.0, seconds))
        except queue.Empty:
            raise TimeoutError from None
        return self._counted(found)

    def arrived(self, seconds: float) -> Iterator[tuple[Key, Item | Ended]]:
        """What is there now, or else what comes first within so many seconds."""
        with contextlib.suppress(queue.Empty):
            found = self._news.get(timeout=seconds)
            while True:
                yield self._counted(found)
                found = self._news.get_nowait()

    def _counted(self, found: tuple[Key, Item | Ended]) -> tuple[Key, Item | Ended]:
        if isinstance(found[1], Ended):
            with self._lock:
                self.active -= 1
        return found

    def close(self) -> None:
        """Take no more. Iterators that have a `close` are closed; others are read no further once they yield again."""
        self.is_closed = True
        for items in self._open:
            with contextlib.suppress(AttributeError, ValueError):  # a generator is executing
                items.close()  # type: ignore[attr-defined]
        while not self._news.empty():  # threads may wait for room in it
            self._news.get_nowait()


def in_order(several: Iterable[Iterable[Timed]]) -> Iterator[Timed]:
    """What several iterators yield, in the order of attempts and then of time; each of them is in that order."""
    return heapq.merge(*several, key=lambda it: (it.attempt, it.time))
