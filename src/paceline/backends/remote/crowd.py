"""The same for many hosts, by a bounded number of threads; and the open files that this takes."""

from __future__ import annotations

import functools
import os
import queue
import resource
import threading
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

AT_ONCE = 64  # threads at first
_MOST = 512  # threads
_STUCK = 0.5  # seconds in which none of the threads finishes with a host, until there are more of them
_OTHERS = 64  # open files besides those of connections
_OF_HOST = 4  # open files of a connection: three, and another one while its process starts

Key = TypeVar("Key")
Result = TypeVar("Result")


class Workers:
    """Threads that do what they are told, a bounded number of things at a time; they end when there is nothing to do.

    None is joined: a wrapper of ssh may never end.
    """

    def __init__(self) -> None:
        self._left: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._threads = 0
        self._most = AT_ONCE

    @property
    def is_behind(self) -> bool:
        """Whether something is left that no thread has begun."""
        return bool(self._left)

    def do(self, work: Callable[[], None]) -> None:
        """Do this as soon as a thread is free."""
        self._left.append(work)
        self._start()

    def grow(self) -> None:
        """Have more threads: those that there are do not come on."""
        self._most = min(self._most + AT_ONCE, _MOST)
        for _ in range(min(len(self._left), AT_ONCE)):
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._threads >= self._most:
                return
            self._threads += 1
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._left:
                    self._threads -= 1
                    return
                work = self._left.popleft()
            work()


class Crowd(Generic[Key, Result]):
    """Does something for each host; `take` gives the results in the order in which they come."""

    def __init__(self, keys: Iterable[Key], do: Callable[[Key], Result]) -> None:
        """Begin."""
        self._workers = Workers()
        self._news: queue.SimpleQueue[tuple[Key, Result | BaseException]] = queue.SimpleQueue()
        for key in keys:
            self._workers.do(functools.partial(self._one, key, do))

    def put(self, key: Key, result: Result | BaseException) -> None:
        """Insert a result; also from another thread."""
        self._news.put((key, result))

    def take(self, seconds: float | None = None) -> tuple[Key, Result | BaseException]:
        """The next result, or the exception that was raised instead. If none comes for long, more is done at once.

        Raises:
            queue.Empty: none has come in time.
        """
        while self._workers.is_behind:
            within = _STUCK if seconds is None else min(_STUCK, seconds)
            try:
                return self._news.get(timeout=within)
            except queue.Empty:
                if seconds is not None and (seconds := seconds - within) <= 0:
                    raise
                self._workers.grow()
        return self._news.get(timeout=seconds)

    def _one(self, key: Key, do: Callable[[Key], Result]) -> None:
        try:
            self.put(key, do(key))
        except BaseException as error:  # for the thread that takes it
            self.put(key, error)


def at_once(keys: Iterable[Key], do: Callable[[Key], Result]) -> dict[Key, Result | UserError]:
    """What `do` returns for each, in their order, or why it cannot be done.

    Raises:
        BaseException: what it raises besides UserError; the others go on.
    """
    keys = list(keys)
    crowd = Crowd(keys, do)
    found: dict[Key, Result | UserError] = {}
    for _ in keys:
        key, result = crowd.take()
        if isinstance(result, BaseException) and not isinstance(result, UserError):
            raise result
        found[key] = result
    return {key: found[key] for key in keys}


def need_files(hosts: int) -> None:
    """Let this process have so many connections at once.

    Raises:
        UserError: it may not open as many files.
    """
    needed = _OF_HOST * hosts + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UserError(
            f"connections to {hosts} hosts need {needed} open files, and this process may have {hard}; "
            f"raise its limit (ulimit -Hn), or name at most {max(1, (hard - _OTHERS) // _OF_HOST)} hosts"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def not_started(error: OSError) -> UserError:
    """Why no ssh could be started."""
    return UserError(
        f"cannot start ssh: {os.strerror(error.errno or 0)}; see ulimit -u and ulimit -n, or name fewer hosts"
    )
