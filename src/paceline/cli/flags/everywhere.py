"""The jobs of all targets at once; a target that does not answer holds the others up no longer than a few seconds."""

from __future__ import annotations

import functools
import json
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.backends import limits, registry
from paceline.backends.base import Listing
from paceline.job import settings_files
from paceline.job.errors import UserError
from paceline.job.paths import jobs_on_named_hosts, targets_in_use

from .where import backend_for, flags_for, kinds_of_hosts

if TYPE_CHECKING:
    from paceline.backends.base import Backend
    from paceline.job.job import Job

_MORE = 2.0  # seconds beyond its limit for hosts in which a target says which of them do not answer


class Place(NamedTuple):
    """A place where jobs are.

    Attributes:
        name: what its jobs show as their target.
        load: its backend.
        jobs: the names of the jobs there that are asked for; None for all.
    """

    name: str
    load: Callable[[], Backend]
    jobs: tuple[str, ...] | None = None

    def describe(self, since: float | None, *, repeats: bool = False) -> Listing:
        """See `Backend.describe`.

        Args:
            since: see there.
            repeats: this is called every few seconds.

        Raises:
            UserError: see there.
        """
        there = self.load()
        if repeats:
            there.look_repeatedly()
        if self.jobs is None:
            return there.describe(since=since)
        found = there.describe(self.jobs)
        recent = [job for job in found.jobs if since is None or not job.is_over or (job.finished or 0.0) >= since]
        lost = (f"{self.name}: {job.error}" for job in recent if job.state == "LOST")
        return Listing(recent, len(found.jobs) - len(recent), tuple(dict.fromkeys((*found.warnings, *lost))))


def places(since: float | None) -> list[Place]:
    """This machine, the targets of the settings, and what flags named for jobs that were submitted from here.

    Args:
        since: leave out hosts whose jobs are known to have ended before this time, in seconds since the epoch.

    Raises:
        UserError: the settings cannot be read.
    """
    names = [registry.HERE]
    if settings_files.exist():
        from paceline.job.settings import load

        names += load().targets
    names += [name for name in targets_in_use() if name not in names and registry.needs_no_target(name)]
    found = [Place(name, functools.partial(_loaded, name)) for name in names]
    for kind in sorted(kinds_of_hosts()):
        groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
        for job, options in jobs_on_named_hosts(kind, since or 0.0):
            groups.setdefault(json.dumps(options, sort_keys=True), (options, []))[1].append(job)
        for options, jobs in groups.values():
            hosts = ",".join(options["hosts"])
            found.append(Place(hosts, functools.partial(backend_for, flags_for(kind, options)), tuple(jobs)))
    return found


@functools.cache
def _loaded(name: str) -> Backend:
    return registry.load(name)


def describe(asked: list[Place], since: float | None, *, repeats: bool = False) -> Listing:
    """The jobs of these places, the newest first; the warnings say which places are left out, and why."""
    answers: queue.SimpleQueue[tuple[int, Listing | UserError]] = queue.SimpleQueue()

    def ask(number: int) -> None:
        try:
            answers.put((number, asked[number].describe(since, repeats=repeats)))
        except UserError as error:
            answers.put((number, error))

    for number in range(len(asked)):  # not waited for at the end: one may hang
        threading.Thread(target=ask, args=(number,), daemon=True).start()
    jobs: dict[tuple[str, float], Job] = {}
    hidden, warnings, missing = 0, [], dict.fromkeys(range(len(asked)))
    seconds = limits.load().look
    deadline = time.monotonic() + seconds + _MORE
    while missing:
        try:
            number, found = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        del missing[number]
        if isinstance(found, UserError):
            warnings.append(f"{asked[number].name}: {found}; its jobs are not shown")
        else:
            for job in found.jobs:  # hosts that flags named may be those of a target, too
                key = job.name, job.created
                if key not in jobs or asked[number].jobs is None:
                    jobs[key] = job
            hidden += found.hidden
            warnings += found.warnings
    warnings += [f"{asked[it].name} does not answer within {seconds:g} s; its jobs are not shown" for it in missing]
    newest_first = sorted(jobs.values(), key=lambda job: job.created, reverse=True)
    return Listing(newest_first, hidden, tuple(dict.fromkeys(warnings)))
