"""The jobs and ranks that a command line names."""

from __future__ import annotations

import functools
import re
import socket
import time
from typing import TYPE_CHECKING

from paceline.backends import everywhere
from paceline.cli.terminal.write import say_once
from paceline.job.errors import UserError
from paceline.job.quantities import show_duration

from .where import backend, is_narrowed, says_who_is_waited_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.backends.base import Backend, Listing
    from paceline.backends.everywhere import Place
    from paceline.job.job import Job

_INSTANCE = re.compile(r"(?:(?P<job>.+)-)?(?P<role>master|worker)-(?P<number>\d{1,9})")


def all_jobs(
    since: float | None = None,
    *,
    repeats: bool = False,
    each: Callable[[Backend, list[Job]], None] | None = None,
) -> Listing:
    """The jobs of all targets, or of where flags say; warns of the machines whose jobs are missing."""
    return _warned_of(everywhere.describe(places(since), since, repeats=repeats, each=each))


def jobs_there() -> Listing:
    """The jobs of the backend of this command line; see `all_jobs`."""
    return _warned_of(backend().describe())


def _warned_of(found: Listing) -> Listing:
    for line in found.warnings:
        say_once(line)
    return found


def places(since: float | None = None) -> list[Place]:
    """All places with jobs, see `everywhere.places`; only one of them if flags say where, or there is no other."""
    asked = [] if is_narrowed() else everywhere.places(since)
    asked = [it._replace(load=functools.partial(_loaded, it)) for it in asked]
    return asked if len(asked) > 1 else [everywhere.Place("", backend)]


def _loaded(place: Place) -> Backend:
    return says_who_is_waited_for(place.load())


def known(names: Sequence[str], *, warns: bool = False, there: Backend | None = None) -> list[Job]:
    """The jobs of these names, in this order."""
    listing = (there or backend()).describe(names)
    found = {job.name: job for job in listing.jobs}
    for name in names:
        if name not in found:
            import difflib  # not needed where all is well

            others = [job.name for job in (there or backend()).describe().jobs]
            close = difflib.get_close_matches(name, others[:1000], n=1, cutoff=0.5)
            where = backend().where
            hint = f"there is none yet; start one with paceline submit{where}"
            if others:
                hint = f"did you mean {close[0]}?" if close else f"see paceline list{where} -A"
            raise UserError(f"no job {name!r}; {hint}")
    for line in listing.warnings if warns else ():
        say_once(line)
    return [found[name] for name in names]


def looked_again(jobs: Sequence[Job]) -> list[Job | None]:
    """These jobs as they are now. One that has been removed is as it was if it had ended, and None if it had not."""
    found = {job.name: job for job in backend().describe([job.name for job in jobs]).jobs}
    return [found.get(job.name, job if job.is_over else None) for job in jobs]


def runs(job: Job, hint: str) -> None:
    """Refuse a job whose ranks do not run."""
    if job.is_over or job.state not in ("RUNNING", "LOST"):
        raise UserError(f"job {job.name} is {job.state}, so no rank runs; {hint}")


def rank_of(job: Job, text: str, flag: str = "-i") -> int:
    """The rank that a flag names: by its number, or by its instance's name with or without the job's."""
    if re.fullmatch(r"\d{1,9}", text):
        rank = int(text)
    else:
        match = _INSTANCE.fullmatch(text)
        if (
            match is None
            or match["job"] not in (None, job.name)
            or (match["role"] == "master" and int(match["number"]))
        ):
            rank = -1
        else:
            rank = 0 if match["role"] == "master" else int(match["number"]) + 1
    if not 0 <= rank < job.ranks:
        others = f" … {job.ranks - 1} (master-0, worker-0 …)" if job.ranks > 1 else " (master-0)"
        raise UserError(
            f"{flag} {text}: job {job.name} has no such instance; it has rank{'s' * (job.ranks > 1)} 0{others}"
        )
    return rank


def node_of(job: Job) -> str | None:
    """The node of rank 0, and how many others there are; None where that is this machine, or not known."""
    nodes = list(dict.fromkeys(rank.node.partition("/")[0] for rank in job.instances if rank.node))
    if not nodes or nodes == [socket.gethostname()]:
        return None
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} +{len(nodes) - 1}"


def outcome(job: Job) -> str:
    """How a job ended, in one line."""
    seconds = job.duration(time.time())
    took = "" if seconds is None else f" after {show_duration(seconds)}"
    why = f": {job.error}" if job.error else ""
    what = f"; what to do: {job.advice}" if job.advice else ""
    return f"job {job.name} {job.state.lower()}{took}{why}{what}"


def how_to_resume(job: Job, where: str) -> str | None:
    """For a job that ended before its training did: what is saved, and the command that goes on from there."""
    if not job.is_over or job.state == "SUCCEEDED" or job.checkpoint is None:
        return None
    return f"step {job.checkpoint['step']} is saved; go on from there with: paceline resubmit{where} {job.name}"
