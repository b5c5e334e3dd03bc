"""Several iterators read at once, and what is waited for beside others: each by its own thread.

All are daemons, and none belongs to an executor: those are waited for at a Ctrl-C, and before the interpreter ends.
"""

from __future__ import annotations

import contextlib
import heapq
import queue
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_KEPT = 64  # items that nobody has taken yet; then the readers wait

Key = TypeVar("Key")
Item = TypeVar("Item")
Result = TypeVar("Result")
Timed = TypeVar("Timed", bound=Any)  # has an attempt and a time


class Ended(NamedTuple):
    """An iterator has ended, with this error or without one."""

    error: BaseException | None


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
        error: BaseException | None = None
        try:
            for item in items:
                if self.is_closed:
                    return
                self.put(key, item)
        except BaseException as caught:  # whoever takes what it yields must not wait for ever
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


def at_once(do: Callable[[Key], Result], items: Iterable[Key], most: int) -> list[Result]:
    """What a function returns for each of these, at most so many at a time; or the first error, when all are done."""
    left = deque(enumerate(items))
    if len(left) == 1:
        return [do(left[0][1])]
    readers: Readers[int, Result] = Readers()
    found: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}
    with contextlib.closing(readers):
        while left or readers.active:
            if left and readers.active < most:
                number, item = left.popleft()
                readers.add(number, map(do, (item,)))
            elif (news := readers.take()) is not None:
                number, result = news
                if not isinstance(result, Ended):
                    found[number] = result
                elif result.error is not None:
                    errors[number] = result.error
    if errors:
        raise errors[min(errors)]
    return [found[number] for number in sorted(found)]


class Begun(Generic[Result]):
    """What a function returns that is called from now on, beside what others do."""

    def __init__(self, do: Callable[[], Result]) -> None:
        self._readers: Readers[None, Result] = Readers()
        self._readers.add(None, (it() for it in (do,)))

    def result(self, seconds: float | None = None) -> Result:
        """Take it, once, or raise its error; TimeoutError if neither is there within so many seconds."""
        news = self._readers.take(seconds)
        assert news is not None
        if not isinstance(news[1], Ended):
            return news[1]
        assert news[1].error is not None
        raise news[1].error


def in_order(several: Iterable[Iterable[Timed]]) -> Iterator[Timed]:
    """What several iterators yield, in the order of attempts and then of time; each of them is in that order."""
    return heapq.merge(*several, key=lambda it: (it.attempt, it.time))
