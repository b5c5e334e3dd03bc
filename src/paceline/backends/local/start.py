"""Starts a job on this machine that has been planned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.backends.refusals import refusals
from paceline.backends.submission import NameTaken, fetched, start_named
from paceline.node.store import make

from .prepare import writing

if TYPE_CHECKING:
    import socket

    from paceline.backends.base import Progress
    from paceline.job.spec import JobSpec


def start(
    spec: JobSpec,
    plan: make.Plan,
    progress: Progress,
    *,
    lifeline: socket.socket | None = None,
    split: tuple[int, ...] = (),
) -> make.Made:
    """Start a job.

    Args:
        spec: what the user asked for.
        plan: what it will be, see `prepare.plan`.
        progress: hears how far it is.
        lifeline: the job ends when the other end closes; None for one that outlives its client.
        split: the local ranks whose stderr is kept apart.

    Raises:
        UserError: the job cannot run here, or its name is taken.
    """
    for flag, value in (("--image", spec.image), ("--queue", spec.queue)):
        if value is not None:
            progress.say(f"{flag} {value} does nothing on this machine, which has no {flag[2:]}s")

    def bring(place: Path) -> dict[str, Any]:
        return fetched(spec, place, progress)

    def start_as(name: str) -> make.Made:
        try:
            named = plan.named(name, lambda _: split)
            if spec.code is not None and spec.resume_from is not None:
                progress(f"copying {spec.resume_from}", 0, None)
            return make.make(named, bring, lifeline)
        except make.Taken as taken:
            raise NameTaken(str(taken)) from None

    with writing(spec), refusals():
        return start_named(spec, start_as)
