"""The jobs and ranks that a command line names."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from paceline.cli.terminal.write import say
from paceline.job.errors import UserError
from paceline.job.quantities import show_duration

from .where import backend, is_narrowed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from paceline.backends.base import Backend, Listing
    from paceline.job.job import Job

_INSTANCE = re.compile(r"(?:(?P<job>.+)-)?(?P<role>master|worker)-(?P<number>\d{1,9})")


_warned: set[str] = set()


def warn(line: str) -> None:
    """Say on stderr, once, what a backend warns of."""
    if line not in _warned:
        _warned.add(line)
        say(line)


def all_jobs(since: float | None = None, *, everywhere: bool = False, repeats: bool = False) -> Listing:
    """All jobs, or those that have not ended before a time; says which hosts they lack.

    Args:
        since: seconds since the epoch.
        everywhere: those of all targets, unless flags say where.
        repeats: this is called every few seconds.
    """
    if everywhere and not is_narrowed():
        found = _of_all_targets(since, repeats)
    else:
        if repeats:
            backend().look_repeatedly()
        found = backend().describe(since=since)
    for line in found.warnings:
        warn(line)
    return found


def _of_all_targets(since: float | None, repeats: bool) -> Listing:
    from .everywhere import describe, places

    asked = places(since)
    return backend().describe(since=since) if len(asked) == 1 else describe(asked, since, repeats=repeats)


def known(names: Sequence[str], *, warns: bool = False, there: Backend | None = None) -> list[Job]:
    """The jobs of these names, in this order.

    Args:
        warns: say which of their machines do not answer.
        there: where they are; None for where this command line looks.

    Raises:
        UserError: there is no such job.
    """
    listing = (there or backend()).describe(names)
    found = {job.name: job for job in listing.jobs}
    for name in names:
        if name not in found:
            import difflib  # not needed where all is well

            others = [job.name for job in all_jobs().jobs]
            close = difflib.get_close_matches(name, others[:1000], n=1, cutoff=0.5)
            where = backend().where
            hint = f"there is none yet; start one with paceline submit{where}"
            if others:
                hint = f"did you mean {close[0]}?" if close else f"see paceline list{where} -A"
            raise UserError(f"no job {name!r}; {hint}")
    for line in listing.warnings if warns else ():
        warn(line)
    return [found[name] for name in names]


def rank_of(job: Job, text: str) -> int:
    """The rank that -i names: by its number, or by its instance's name with or without the job's.

    Raises:
        UserError: the job has none such.
    """
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
        raise UserError(f"-i {text}: job {job.name} has no such instance; it has rank{'s' * (job.ranks > 1)} 0{others}")
    return rank


def failed(failure: Mapping[str, Any]) -> str:
    """Which rank failed, where, and why, in one line."""
    where = f" on {failure['host']}" if failure.get("host") else ""
    who = f"node {failure.get('node')}" if failure.get("rank") is None else f"rank {failure['rank']}"
    return f"{who}{where}: {failure['message']}"


def outcome(job: Job) -> str:
    """How a job ended, in one line."""
    seconds = job.duration(time.time())
    took = "" if seconds is None else f" after {show_duration(seconds)}"
    return f"job {job.name} {job.state.lower()}{took}{f': {job.error}' if job.error else ''}"


def how_to_resume(job: Job, where: str) -> str | None:
    """For a job that ended before its training did: what is saved, and the command that goes on from there.

    Args:
        where: the flags that lead to its backend, with a space before them.
    """
    if not job.is_over or job.state == "SUCCEEDED" or job.checkpoint is None:
        return None
    return f"step {job.checkpoint['step']} is saved; go on from there with: paceline resubmit{where} {job.name}"
