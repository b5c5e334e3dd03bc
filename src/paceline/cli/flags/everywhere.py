"""The jobs of all targets at once; a target that does not answer holds the others up no longer than a few seconds."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING

from paceline.backends import limits, registry
from paceline.backends.base import Listing
from paceline.job import settings_files
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from paceline.job.job import Job

_MORE = 2.0  # seconds beyond its limit for hosts in which a target says which of them do not answer


def targets() -> list[str]:
    """This machine, and the targets of the settings.

    Raises:
        UserError: the settings cannot be read.
    """
    if not settings_files.exist():
        return [registry.HERE]
    from paceline.job.settings import load

    return [registry.HERE, *load().targets]


def describe(names: list[str], since: float | None) -> Listing:
    """The jobs of these targets, the newest first; the warnings say which targets are left out, and why."""
    answers: queue.SimpleQueue[tuple[str, Listing | UserError]] = queue.SimpleQueue()

    def ask(name: str) -> None:
        try:
            answers.put((name, registry.load(name).describe(since=since)))
        except UserError as error:
            answers.put((name, error))

    for name in names:  # not waited for at the end: one may hang
        threading.Thread(target=ask, args=(name,), daemon=True).start()
    jobs: list[Job] = []
    hidden, warnings, missing = 0, [], dict.fromkeys(names)
    seconds = limits.load().look
    deadline = time.monotonic() + seconds + _MORE
    while missing:
        try:
            name, found = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        del missing[name]
        if isinstance(found, UserError):
            warnings.append(f"{name}: {found}; its jobs are not shown")
        else:
            jobs += found.jobs
            hidden += found.hidden
            warnings += found.warnings
    warnings += [f"{name} does not answer within {seconds:g} s; its jobs are not shown" for name in missing]
    return Listing(sorted(jobs, key=lambda job: job.created, reverse=True), hidden, tuple(warnings))
