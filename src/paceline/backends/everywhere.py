"""What all targets know, at once; a target that does not answer holds the others up no longer than a few seconds."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from paceline.job import settings_files
from paceline.job.errors import UserError
from paceline.job.paths import (
    jobs_folder,
    jobs_on_named_hosts,
    submitted_options,
    target_folder,
    targets_in_use,
    targets_with,
)
from paceline.node.readers import Ended, Readers

from . import limits, registry
from .base import Listing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.job.job import Job

    from .base import Backend

_OF_MACHINE = 0.05  # seconds more for each of its machines
_MORE = 2.0  # seconds beyond its limit for hosts in which a target says which of them do not answer
_T = TypeVar("_T")


class Place(NamedTuple):
    """A place where jobs are.

    Attributes:
        name: of the target, or its hosts; "" for the one that a command line names.
        load: its backend, always the same one.
        jobs: the names of the jobs there that are asked for; None for all.
        another: a backend of its own for another thread; None where `load` does.
    """

    name: str
    load: Callable[[], Backend]
    jobs: tuple[str, ...] | None = None
    another: Callable[[], Backend] | None = None


def places(since: float | None = None) -> list[Place]:
    """This machine, the targets of the settings, and hosts that flags named for jobs that had not ended by `since`."""
    names = [registry.HERE, *_targets()]
    names += [name for name in targets_in_use() if name not in names and registry.needs_no_target(name)]
    found = [
        Place(name, functools.partial(_loaded, name), None, functools.partial(registry.load, name)) for name in names
    ]
    for kind in sorted(registry.kinds_of_hosts()):
        groups: dict[str, list[str]] = {}
        for job, options in jobs_on_named_hosts(kind, since or 0.0):
            groups.setdefault(json.dumps(options, sort_keys=True), []).append(job)
        for text, jobs in groups.items():
            hosts = ",".join(json.loads(text)["hosts"])
            loads = functools.partial(_on_hosts, kind, text), functools.partial(_on_hosts.__wrapped__, kind, text)
            found.append(Place(hosts, loads[0], tuple(jobs), loads[1]))
    return found


@functools.cache
def _loaded(name: str) -> Backend:
    return registry.load(name)


@functools.cache
def _on_hosts(kind: str, options: str) -> Backend:
    return registry.on_hosts(kind, json.loads(options))


def target_of(name: str) -> str | None:
    """Where a job of this name is, as far as this machine knows; a job here goes before those elsewhere."""
    if "/" in name or os.path.lexists(jobs_folder() / name):
        return registry.HERE
    targets = targets_with(name)
    if len(targets) > 1:
        raise UserError(f"there is a job {name} on {' and on '.join(targets)}; say which with --on")
    return targets[0] if targets else None


def backend_with(name: str, target: str | None = None) -> Backend:
    """The backend that a job of this name was submitted to from here; this machine's if none was.

    Of several jobs of one name, `target` says which: the name of a target, or the kind of the hosts that flags named.
    """
    target = target or target_of(name)
    options = hosts_named_for([name], target)
    return registry.load(target) if options is None else registry.on_hosts(str(target), options)


def hosts_named_for(names: Sequence[str], target: str | None) -> dict[str, Any] | None:
    """The options of the hosts that flags named for these jobs of `target`; None if they were submitted to a target.

    Hosts that were named for one of the jobs are those of all. Raises `UserError` if no one backend has all jobs.
    """
    if target not in registry.kinds_of_hosts():
        return None
    found: dict[str, Any] | None = None
    for name in names:
        options = submitted_options(target, name)
        if options is None and target not in _targets():
            note = target_folder(target) / name
            raise UserError(f"{note} is damaged; say where job {name} is with --on or -H")
        if name == names[0]:
            found = options
        elif found is None or options is None or {**found, "hosts": None} != {**options, "hosts": None}:
            raise UserError(f"job {names[0]} is not where {name} is; name one of them, or say with --on or -H where")
        else:
            known = {host.rpartition(":")[0] or host for host in found["hosts"]}
            found["hosts"] += [host for host in options["hosts"] if (host.rpartition(":")[0] or host) not in known]
    return found


def _targets() -> Sequence[str]:
    """The names of the targets of the settings."""
    if not settings_files.exist():
        return ()
    from paceline.job.settings import load

    return tuple(load().targets)


def describe(
    asked: Sequence[Place],
    since: float | None = None,  # leaves out jobs that ended before
    *,
    repeats: bool = False,  # every few seconds
    each: Callable[[Backend, list[Job]], None] | None = None,  # within the time that its place has for its answer
) -> Listing:
    """The jobs of these places, the newest first; the warnings say which places are left out, and why."""

    def look(place: Place) -> Listing:
        there = place.load()
        if repeats:
            there.look_repeatedly()
        found = there.describe(place.jobs, since)
        if place.jobs is not None:
            recent = [job for job in found.jobs if job.is_recent(since)]
            lost = (f"{place.name}: {job.error}" for job in recent if job.state == "LOST")
            found = Listing(recent, len(found.jobs) - len(recent), tuple(dict.fromkeys((*found.warnings, *lost))))
        if each is not None:
            each(there, found.jobs)
        return found

    answers, missing = ask(asked, look, "its jobs are not shown")
    jobs: dict[tuple[str, float], Job] = {}
    hidden = 0
    warnings: list[str] = []
    for place, found in answers:
        for job in found.jobs:  # hosts that flags named may be those of a target, too
            key = job.name, job.created
            if key not in jobs or place.jobs is None:
                jobs[key] = job
        hidden += found.hidden
        warnings += found.warnings
    newest_first = sorted(jobs.values(), key=lambda job: job.created, reverse=True)
    return Listing(newest_first, hidden, tuple(dict.fromkeys((*warnings, *missing))))


def ask(
    asked: Sequence[Place], question: Callable[[Place], _T], without: str
) -> tuple[list[tuple[Place, _T]], list[str]]:
    """What these places answer, all at the same time; and a line about each that is left out."""
    if len(asked) == 1:
        return [(asked[0], question(asked[0]))], []
    readers: Readers[int, _T] = Readers()
    seconds = limits.load().look
    deadlines = dict.fromkeys(range(len(asked)), time.monotonic() + seconds + _MORE)

    def one(number: int) -> _T:
        deadlines[number] += _OF_MACHINE * asked[number].load().machines
        return question(asked[number])

    found: list[tuple[Place, _T]] = []
    warnings: list[str] = []
    missing = dict.fromkeys(range(len(asked)))
    with contextlib.closing(readers):  # waits for none of them: one may hang
        for number in missing:
            readers.add(number, map(one, (number,)))
        while missing and (remaining := max(deadlines[number] for number in missing) - time.monotonic()) > 0:
            for number, answer in readers.arrived(remaining):
                if not isinstance(answer, Ended):
                    found.append((asked[number], answer))
                elif (error := answer.error) is not None:
                    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
                    warnings.append(f"{asked[number].name}: {kind}{error}; {without}")
                missing.pop(number, None)
    warnings += [f"{asked[number].name} does not answer within {seconds:g} s; {without}" for number in missing]
    return sorted(found, key=lambda answer: asked.index(answer[0])), warnings
