"""Starts a prepared job on this machine."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from paceline.backends import moving
from paceline.backends.refusals import refusals
from paceline.backends.submission import NameTaken, fetched, start_named
from paceline.contract.values import join_address
from paceline.job.paths import jobs_folder, make_private
from paceline.node.store import make
from paceline.node.store.code_copy import unpacked
from paceline.node.store.plan import Taken, has_checkpoint

from .prepare import LocalPrepared, writing

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from paceline.backends.base import Prepared, ProgressReporter
    from paceline.job.spec import JobSpec
    from paceline.node.store.code_copy import Code


def start(
    prepared: Prepared,
    progress: ProgressReporter,
    *,
    lifeline: socket.socket | None = None,
    split: tuple[int, ...] = (),
    stdin: int | None = None,
) -> make.Made:
    """Start a job.

    Args:
        prepared: see `prepare.prepared`.
        progress: is called with how far it is.
        lifeline: the job ends when the other end closes; None for one that outlives its client.
        split: the local ranks whose stderr is kept apart.
        stdin: the local rank that reads this process's standard input; None if no rank does.

    Raises:
        UserError: the job cannot run here, or its name is taken.
    """
    assert isinstance(prepared, LocalPrepared)
    spec, plan = prepared.asked, prepared.plan
    if stdin is not None:
        reader = (stdin, f"/proc/{os.getpid()}/fd/0")  # the job ends with this process
        plan = replace(plan, order=replace(plan.order, stdin=reader), node=replace(plan.node, stdin=reader))
    make_private(jobs_folder().parent)
    _warn_of_no_token(spec, progress)
    if plan.order.data:
        from paceline.node.machine.volumes import notes

        for line in notes(plan.order.data):
            progress.say(line)

    with contextlib.ExitStack() as stack:
        bring, checkpoint = _sources(prepared, progress, stack)

        def start_as(name: str) -> make.Made:
            try:
                if checkpoint is not None:
                    checkpoint.seek(0)
                named = plan.named(name, lambda _: split)
                if spec.code is not None and spec.resume_from is not None:
                    progress(f"copying {spec.resume_from}", 0, None)
                return make.make(named, bring, lifeline, checkpoint)
            except Taken as taken:
                raise NameTaken(str(taken)) from None

        with writing(spec), refusals():
            return start_named(spec, start_as)


def _sources(
    prepared: LocalPrepared, progress: ProgressReporter, stack: contextlib.ExitStack
) -> tuple[Code, IO[bytes] | None]:
    """What brings the code, and the archive of the checkpoint that comes from another target."""
    left, order = prepared.left, prepared.plan.order
    if left is None:
        return lambda folder: fetched(prepared.asked, folder, progress), None
    for line in moving.notes(prepared.asked, left):
        progress.say(line)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    code, checkpoint = folder / "code.tar", folder / "checkpoint.tar"
    record = moving.fetched_code(left, code, progress)
    if order.brought is None or not order.brought.into or has_checkpoint(order, Path(order.job["working_dir"])):
        return _unpacked(code, record), None
    moving.fetched_checkpoint(left, checkpoint, progress)
    return _unpacked(code, record), stack.enter_context(checkpoint.open("rb"))


def _unpacked(archive: Path, record: Mapping[str, Any] | None) -> Code:
    def unpack(destination: Path) -> dict[str, Any]:
        with archive.open("rb") as file:
            return unpacked(file, record or {})(destination)

    return unpack


def _warn_of_no_token(spec: JobSpec, progress: ProgressReporter) -> None:
    """Say on the machine where others join that anyone may, if that is so."""
    meeting = spec.rendezvous
    address = meeting.main_address
    if address is None or "PACELINE_TOKEN" in os.environ:
        return
    from paceline.node.machine.network import is_loopback
    from paceline.node.rendezvous.participant import is_here

    is_first = meeting.node_rank == 0 or (meeting.node_rank is None and is_here(address))
    if is_first and not is_loopback(meeting.local_address or address):
        who = "anyone who can connect" if meeting.run_id is None else "anyone who knows --rdzv-id and can connect"
        progress.say(
            f"{who} to {join_address(address, meeting.main_port or 0)} may join this job; "
            "set PACELINE_TOKEN to a secret on all its machines"
        )
