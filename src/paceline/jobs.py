"""Jobs from Python: what the command line does, with the same `JobSpec` and the same refusals.

import paceline.jobs

job = paceline.jobs.submit(paceline.jobs.JobSpec(script="train.py", ranks=2))
paceline.jobs.wait(job.name)

Without `on`, the name of a target, a job is found on the target that this machine has submitted it to.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from paceline.backends import everywhere
from paceline.backends.base import Incomplete, LogLines, LogQuery, Prepared
from paceline.backends.registry import load
from paceline.job.errors import UserError
from paceline.job.job import Instance, Job, Node, Volume
from paceline.job.secret_values import notes_on_secrets
from paceline.job.spec import Code, JobSpec, Mount, Rendezvous

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.backends.base import Backend

__all__ = [
    "Code", "Incomplete", "Instance", "Job", "JobSpec", "LogLines", "LogQuery", "Mount", "Node", "Prepared",
    "Rendezvous", "UserError", "Volume", "delete", "get", "list_jobs", "logs", "prepare", "stop", "submit", "wait",
]  # fmt: skip


def prepare(spec: JobSpec) -> Prepared:
    """Find out what `submit` would do; starts nothing.

    Raises:
        UserError: the job cannot run, or its name is taken.
    """
    _warn(spec)
    return load(spec.backend).prepare(spec)


def submit(spec: JobSpec) -> Job:
    """Start a job that goes on by itself.

    Raises:
        UserError: it cannot run, or its name is taken.
    """
    _warn(spec)
    there = load(spec.backend)
    return there.start(there.prepare(spec), _Silence())


def list_jobs(on: str | None = None) -> list[Job]:
    """The jobs of all targets, or of one, the newest first; warns of targets that do not answer.

    Raises:
        UserError: there is no such target, or the only one does not answer.
    """
    found = everywhere.describe(everywhere.places()) if on is None else load(on).describe()
    for line in found.warnings:
        warnings.warn(line, stacklevel=2)
    return found.jobs


def get(name: str, on: str | None = None) -> Job:
    """What is known of a job.

    Raises:
        UserError: there is none of this name.
    """
    found = _there(name, on).describe([name]).jobs
    if not found:
        raise UserError(f"no job {name!r}")
    return found[0]


def logs(name: str, query: LogQuery | None = None, on: str | None = None) -> Iterator[LogLines]:
    """Lines that a job has written: rank 0's, unless the query says otherwise.

    Raises:
        UserError: there is no such job.
        Incomplete: after the last line, if those of some machine may be missing.
    """
    get(name, on)
    return _there(name, on).logs(name, query or LogQuery())


def wait(name: str, seconds: float | None = None, on: str | None = None) -> Job:
    """Come back when a job has ended, or the time is over; what is known of it then.

    Raises:
        UserError: there is no such job.
    """
    get(name, on)
    _there(name, on).wait([name], seconds)
    return get(name, on)


def stop(name: str, now: bool = False, on: str | None = None) -> None:
    """Ask a job to stop: cleanly, or at once.

    Raises:
        UserError: there is no such job.
    """
    _there(name, on).stop([name], now)


def delete(name: str, on: str | None = None) -> None:
    """Remove a job that has ended, with all that was written for it.

    Raises:
        UserError: there is no such job, or it has not ended.
    """
    _there(name, on).delete([name])


def _there(name: str, on: str | None) -> Backend:
    """The target that is named, or the one that this machine has submitted a job of this name to."""
    return everywhere.backend_with(name) if on is None else load(on)


def _warn(spec: JobSpec) -> None:
    for line in notes_on_secrets(spec.env, spec.has_unused_credentials):
        warnings.warn(line, stacklevel=3)


class _Silence:
    """Progress that is not shown."""

    def __call__(self, what: str, done: int, total: int | None) -> None:
        pass

    def say(self, line: str) -> None:
        pass
