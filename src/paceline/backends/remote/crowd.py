"""The same for many hosts, by a bounded number of threads; and the open files that this takes."""

from __future__ import annotations

import functools
import math
import os
import queue
import resource
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

AT_ONCE = 64  # threads at first
_MOST = 512  # threads
_STUCK = 0.5  # seconds in which none of the threads finishes with a host, until there are more of them
_LEAST_OVERDUE = 1.0  # seconds in which a host is not overdue
_OVERDUE = 1.5  # times as long as the others have taken at most
_NOTICE = 2.0  # seconds until it is said who is overdue, and until it is said again
_OTHERS = 64  # open files besides those of connections
_OF_HOST, _OF_START = 3, 4  # open files of a connection, and others while its process starts

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

    def __init__(
        self, keys: Iterable[Key], do: Callable[[Key], Result], notice: Callable[[list[Key]], None] | None = None
    ) -> None:
        """Begin."""
        self._workers = Workers()
        self._news: queue.SimpleQueue[tuple[Key, Result | BaseException]] = queue.SimpleQueue()
        self._notice, self._notice_at = notice, time.monotonic() + _NOTICE
        self._missing = dict.fromkeys(keys)
        self._begun: dict[Key, float] = {}
        self._ended: dict[Key, float] = {}
        self._longest = 0.0  # of those that have succeeded
        for key in self._missing:
            self._workers.do(functools.partial(self._one, key, do))

    def put(self, key: Key, result: Result | BaseException) -> None:
        """Insert a result; also from another thread."""
        self._ended[key] = time.monotonic()
        if not isinstance(result, BaseException):
            self._longest = max(self._longest, self.seconds(key))
        self._news.put((key, result))

    def seconds(self, key: Key) -> float:
        """How long this has taken, so far if it goes on; 0 if it has not begun."""
        if key not in self._begun:
            return 0.0
        return self._ended.get(key, time.monotonic()) - self._begun[key]

    @property
    def overdue_at(self) -> float:
        """When the next one is overdue (monotonic): it takes much longer than the others have taken."""
        oldest = next((self._begun[key] for key in self._missing if key in self._begun), math.inf)
        return oldest + max(_LEAST_OVERDUE, _OVERDUE * self._longest)

    def overdue(self) -> list[Key]:
        """Those that are overdue now."""
        return self._slower_than(_OVERDUE * self._longest)

    def _slower_than(self, seconds: float) -> list[Key]:
        within = max(_LEAST_OVERDUE, seconds)
        return [key for key in self._missing if key not in self._ended and self.seconds(key) >= within]

    def leave(self, key: Key) -> None:
        """Wait for this no longer; its result may still come."""
        self._missing.pop(key, None)

    def take(self, seconds: float | None = None) -> tuple[Key, Result | BaseException]:
        """The next result, or the exception that was raised instead. If none comes for long, more is done at once."""
        until = math.inf if seconds is None else time.monotonic() + seconds
        stuck = time.monotonic() + _STUCK
        while True:
            notice = max(self._notice_at, self.overdue_at) if self._notice and self._longest else math.inf
            if self._notice and notice <= time.monotonic():
                self._notice(self._slower_than(self._longest))
                self._notice_at = notice = time.monotonic() + _NOTICE
            wake = min(until, notice, stuck if self._workers.is_behind else math.inf)
            try:
                key, result = self._news.get(timeout=None if wake == math.inf else max(0.0, wake - time.monotonic()))
            except queue.Empty:
                if wake == until:
                    raise
                if wake == stuck:
                    self._workers.grow()
                    stuck = time.monotonic() + _STUCK
                continue
            self.leave(key)
            return key, result

    def _one(self, key: Key, do: Callable[[Key], Result]) -> None:
        self._begun[key] = time.monotonic()
        try:
            self.put(key, do(key))
        except BaseException as error:  # for the thread that takes it
            self.put(key, error)


def at_once(
    keys: Iterable[Key], do: Callable[[Key], Result], notice: Callable[[list[Key]], None] | None = None
) -> dict[Key, Result | UserError]:
    """What `do` returns for each, in their order, or why it cannot be done; see `Crowd`."""
    keys = list(keys)
    crowd = Crowd(keys, do, notice)
    found: dict[Key, Result | UserError] = {}
    for _ in keys:
        key, result = crowd.take()
        if isinstance(result, BaseException) and not isinstance(result, UserError):
            raise result
        found[key] = result
    return {key: found[key] for key in keys}


def need_files(hosts: int) -> None:
    """Let this process have so many connections at once."""
    needed = _OF_HOST * hosts + _OF_START * min(hosts, AT_ONCE) + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        left = hard - _OTHERS
        most = max(1, left // (_OF_HOST + _OF_START), (left - _OF_START * AT_ONCE) // _OF_HOST)
        raise UserError(
            f"connections to {hosts} hosts need {needed} open files, and this process may have {hard}; "
            f"raise its limit (ulimit -Hn), or name at most {most} hosts"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def not_started(error: OSError) -> UserError:
    """Why no ssh could be started."""
    return UserError(
        f"cannot start ssh: {os.strerror(error.errno or 0)}; see ulimit -u and ulimit -n, or name fewer hosts"
    )
