"""Waits until jobs on hosts have ended, also if a host is lost meanwhile, or others join."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING

from paceline.backends.remote.connection import Unreachable
from paceline.job.errors import UserError

from .streams import Streams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.backends.remote.connection import Host
    from paceline.contract.messages import OfJobs

    from .jobs import RemoteJobs

    Part = tuple[Host, str]  # of the job of this name

_CLOSING = 5.0  # seconds from the end of a job on one host to its end on the others, at most, unless one hangs
_WATCHED = 32  # hosts of a job that say when it ends there; the others are asked then
_SOON = 10.0  # seconds; a host that is lost again within them is not connected to again


class Waiting:
    """Jobs that are waited for, each on all hosts that have a part of it."""

    def __init__(self, jobs: RemoteJobs, names: Sequence[str], deadline: float, tick: Callable[[int], None]) -> None:
        """Wait for nothing yet."""
        self._jobs, self._names, self._deadline, self._tick = jobs, list(names), deadline, tick
        self._ended: set[Part] = set()
        self._lost: dict[Host, UserError] = {}

    def until_over(self) -> bool:
        """Wait; returns whether the jobs have ended.

        A host that hangs or is lost is not waited for if the job is known to have ended from the others.
        """
        parts = {(host, name) for name in self._names for host in self._jobs.hosts_of(name)}
        while parts:
            began = time.monotonic()
            before = dict(self._lost)
            if not self._wait_for(self._some(parts)):
                return False
            over = self._jobs.over(self._names)
            going = [name for name in self._names if name not in over]
            if not going:
                return True
            living = {(host, name) for name in going for host in self._jobs.seen(name).living}
            parts = living - self._ended
            again = [error for host, error in before.items() if self._lost[host] is not error]
            if again and time.monotonic() - began < _SOON:
                raise again[0]
            if self._lost and {name for _, name in parts} != set(going):
                raise next(iter(self._lost.values()))
        return True

    def _some(self, parts: set[Part]) -> set[Part]:
        """Some of these parts of each job, node 0 first if it is there: they all end at about the same time."""
        found: set[Part] = set()
        for name in self._names:
            hosts = [host for host in self._jobs.hosts_of(name) if (host, name) in parts]
            found |= {(host, name) for host in hosts[:_WATCHED]}
        return found

    def _wait_for(self, parts: set[Part]) -> bool:
        """Wait until these parts have ended, or no connected host knows of a job any more; returns False if in vain."""
        look = math.inf  # when to ask whether jobs that have ended somewhere are over
        request: OfJobs = {"do": "wait", "names": self._names}
        with contextlib.closing(Streams(dict.fromkeys(host for host, _ in parts), lambda _: request)) as streams:
            while parts:
                until = min(self._deadline, look)
                try:
                    found = streams.take(None if until == math.inf else until - time.monotonic())
                except TimeoutError:
                    if until == self._deadline:
                        return False
                    look, over = math.inf, self._jobs.over(self._names)
                    parts = {(host, name) for host, name in parts if name not in over}
                    continue
                if found is None:
                    return True
                host, answer = found
                if isinstance(answer, UserError):
                    if not isinstance(answer, Unreachable):
                        raise answer
                    self._lost[host] = answer
                    gone = {name for it, name in parts if it == host}
                    parts = {part for part in parts if part[0] != host}
                    if gone - {name for _, name in parts}:
                        return True
                elif "ended" in answer:
                    part = host, answer["ended"]
                    parts = parts - {part}
                    self._ended.add(part)
                    self._jobs.has_ended(answer["ended"], host)
                    look = time.monotonic() + _CLOSING
                self._tick(len(set(self._names) - {name for _, name in parts}))
        return True
