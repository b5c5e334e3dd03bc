"""Which events of jobs are told to whom, each once: from what is known of the jobs at one time after the other.

No clock and no network: `now` is given. A target that does not answer makes no event, since what was known of its jobs
stays; a job that is LOST has not answered either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from paceline.job.job import hangs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from paceline.job.job import Job
    from paceline.job.settings import Receiver

_AGAIN = 600.0  # seconds between two notices that a job hangs
_MOST_MARKS = 10_000


class Mark(msgspec.Struct):
    """What was told of a job that has not ended; it is kept when the process ends.

    Attributes:
        slow_since: when it became slow; None if it is not.
        told_slow: to whom that it is slow.
        told_hang: to whom that it hangs as it does now.
        last_hang: when a receiver was told last that it hangs.
    """

    name: str
    created: float
    slow_since: float | None = None
    told_slow: list[str] = []
    told_hang: list[str] = []
    last_hang: dict[str, float] = {}


class Due(NamedTuple):
    """An event of a job, and who is to be told."""

    receiver: str
    event: str
    job: Job


class Decider:
    """Knows what was told. Jobs that had ended before `began`, in seconds since the epoch, make no event."""

    def __init__(self, receivers: Mapping[str, Receiver], began: float, marks: Iterable[Mark] = ()) -> None:
        self._receivers = receivers
        self._began = began
        # By name and time: the job of hosts that flags named may be one of a target, too.
        self._live = {(mark.name, mark.created): mark for mark in marks}
        self._over: set[tuple[str, float]] = set()

    def marks(self) -> list[Mark]:
        """What has to be known when the process starts again: jobs that have ended are not among it."""
        return list(self._live.values())[-_MOST_MARKS:]

    def decide(self, jobs: Iterable[Job], now: float) -> list[Due]:
        """What is to be told now."""
        due: list[Due] = []
        for job in jobs:
            key = job.name, job.created
            if job.state == "LOST" or (job.is_over and key in self._over):
                continue
            if job.is_over:
                self._over.add(key)
                was_seen = self._live.pop(key, None) is not None
                if was_seen or (job.finished is not None and job.finished >= self._began):
                    event = "failed" if job.state == "FAILED" else "ended"
                    due += [Due(name, event, job) for name in self._wanting(event, job)]
                continue
            self._over.discard(key)  # an ended job may be started again
            mark = self._live.get(key)
            if mark is None:
                mark = self._live[key] = Mark(*key)
            due += self._hung(job, mark, now)
            due += self._slow(job, mark, now)
        return due

    def _wanting(self, event: str, job: Job) -> list[str]:
        return [
            name
            for name, it in self._receivers.items()
            if event in it.on
            and (it.targets is None or job.backend in it.targets)
            and it.labels.items() <= job.labels.items()
        ]

    def _hung(self, job: Job, mark: Mark, now: float) -> list[Due]:
        if not hangs(job):
            mark.told_hang = []
            return []
        due = []
        for name in self._wanting("hung", job):
            if name not in mark.told_hang and now - mark.last_hang.get(name, -_AGAIN) >= _AGAIN:
                mark.told_hang.append(name)
                mark.last_hang[name] = now
                due.append(Due(name, "hung", job))
        return due

    def _slow(self, job: Job, mark: Mark, now: float) -> list[Due]:
        if not job.slow or job.state != "RUNNING":
            mark.slow_since = None
            return []
        if mark.slow_since is None:
            mark.slow_since = now
        since, due = mark.slow_since, []
        for name in self._wanting("slow", job):
            if name not in mark.told_slow and now - since >= self._receivers[name].slow_for:
                mark.told_slow.append(name)
                due.append(Due(name, "slow", job))
        return due
