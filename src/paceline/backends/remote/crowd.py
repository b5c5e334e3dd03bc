"""The same for many hosts, a bounded number of them at a time; and the open files that this takes."""

from __future__ import annotations

import asyncio
import math
import os
import resource
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from paceline.job.errors import UserError

from .engine import run

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Coroutine, Iterable, Set

AT_ONCE = 64  # hosts at first
_MOST = 512  # hosts
_STUCK = 0.5  # seconds in which none of them is done, until more are begun
_BRIEFLY = 0.5  # seconds that a host that was silent a moment ago is waited for longer than the others
_LEAST_OVERDUE = 1.0  # seconds in which a host is not overdue
_OVERDUE = 1.5  # times as long as the others have taken at most
_NOTICE = 2.0  # seconds until it is said who is overdue, and until it is said again
_OTHERS = 64  # open files besides those of connections
_OF_HOST, _OF_START = 3, 4  # open files of a connection, and others while its process starts

Key = TypeVar("Key")
Result = TypeVar("Result")


class Crowd(Generic[Key, Result]):
    """Does something for each host, a bounded number of them at a time; runs in the engine's thread.

    Attributes:
        found: the results so far, and errors.
        seconds: how long these have taken, or were waited for.
    """

    def __init__(
        self,
        keys: Iterable[Key],
        do: Callable[[Key], Coroutine[Any, Any, Result]],
        notice: Callable[[list[Key]], None] | None = None,
        few: float = 0.0,  # so many are left when they are overdue
        brief: Set[Key] = frozenset(),  # are left soon when they are the last
    ) -> None:
        """Begin nothing yet."""
        self._left, self._do, self._notice, self._few, self._brief = deque(keys), do, notice, few, brief
        self._missing = dict.fromkeys(self._left)
        self._tasks: dict[asyncio.Task[Result], Key] = {}
        self._begun: dict[Key, float] = {}
        self._longest = 0.0  # of those that have succeeded
        self.found: dict[Key, Result | UserError] = {}
        self.seconds: dict[Key, float] = {}

    async def work(self) -> None:
        """Wait until all are done, or left. If none is done for long, more are begun."""
        most, done_at = AT_ONCE, time.monotonic()
        stuck_at, notice_at = done_at + _STUCK, done_at + _NOTICE
        try:
            while self._missing:
                while self._left and len(self._tasks) < most:
                    self._begin(self._left.popleft())
                overdue_at = self._begun[next(iter(self._tasks.values()))] + self._within(_OVERDUE)
                late_at = overdue_at if len(self._missing) <= self._few else math.inf
                end_at = done_at + _BRIEFLY if self._brief >= self._missing.keys() else math.inf
                say_at = max(notice_at, overdue_at) if self._notice and self._longest else math.inf
                grow_at = stuck_at if self._left else math.inf
                wake = min(late_at, end_at, say_at, grow_at)
                seconds = None if wake == math.inf else max(0.0, wake - time.monotonic())
                done, _ = await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                now = time.monotonic()
                if done:
                    done_at, stuck_at = now, now + _STUCK
                    for task in done:
                        self._end(task)
                elif wake == say_at and self._notice:
                    self._notice(self._slower_than(1.0))
                    notice_at = now + _NOTICE
                elif wake == grow_at:
                    most, stuck_at = min(most + AT_ONCE, _MOST), now + _STUCK
                else:
                    for key in self._slower_than(_OVERDUE) if wake == late_at else list(self._missing):
                        del self._missing[key]
                        self.seconds[key] = now - self._begun.get(key, now)
                    self._cancel(self._missing)
        finally:
            self._cancel(())

    def _begin(self, key: Key) -> None:
        self._begun[key] = time.monotonic()
        task = asyncio.get_running_loop().create_task(self._do(key))
        task.add_done_callback(lambda it: it.cancelled() or it.exception())  # also of one that is left
        self._tasks[task] = key

    def _end(self, task: asyncio.Task[Result]) -> None:
        key, error = self._tasks.pop(task), task.exception()
        del self._missing[key]
        self.seconds[key] = time.monotonic() - self._begun[key]
        if error is None:
            self._longest = max(self._longest, self.seconds[key])
        elif not isinstance(error, UserError):
            raise error
        self.found[key] = error or task.result()

    def _cancel(self, but: Container[Key]) -> None:
        """Wait for no others than these; their connections end by themselves."""
        for task in [task for task, key in self._tasks.items() if key not in but]:
            del self._tasks[task]
            task.cancel()

    def _within(self, times: float) -> float:
        """Seconds in which a host is not overdue: so many times as long as the others have taken at most."""
        return max(_LEAST_OVERDUE, times * self._longest)

    def _slower_than(self, times: float) -> list[Key]:
        since = time.monotonic() - self._within(times)
        return [key for key in self._tasks.values() if self._begun[key] <= since]


def at_once(
    keys: Iterable[Key],
    do: Callable[[Key], Coroutine[Any, Any, Result]],
    notice: Callable[[list[Key]], None] | None = None,
) -> dict[Key, Result | UserError]:
    """What `do` returns for each, in their order, or why it cannot be done; see `Crowd`."""
    keys = list(keys)
    crowd = Crowd(keys, do, notice)
    run(crowd.work())
    return {key: crowd.found[key] for key in keys}


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
