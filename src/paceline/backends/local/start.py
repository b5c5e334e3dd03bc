"""Starts a prepared job on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.backends.refusals import refusals
from paceline.backends.submission import NameTaken, fetched, start_named
from paceline.node.store import make

from .prepare import LocalPrepared, writing

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    from paceline.backends.base import Prepared, Progress


def start(
    prepared: Prepared, progress: Progress, *, lifeline: socket.socket | None = None, split: tuple[int, ...] = ()
) -> make.Made:
    """Start a job.

    Args:
        prepared: see `prepare.prepared`.
        progress: is called with how far it is.
        lifeline: the job ends when the other end closes; None for one that outlives its client.
        split: the local ranks whose stderr is kept apart.

    Raises:
        UserError: the job cannot run here, or its name is taken.
    """
    assert isinstance(prepared, LocalPrepared)
    spec, plan = prepared.asked, prepared.plan

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
