"""Starts a prepared job on this machine."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paceline.backends import moving
from paceline.backends.refusals import refusals
from paceline.backends.submission import fetched, names
from paceline.contract.placement import MAIN_PORT
from paceline.contract.values import join_address
from paceline.job.paths import jobs_folder, make_private
from paceline.node.store import make
from paceline.node.store.code_folder import building, unpack
from paceline.node.store.plan import Taken, has_checkpoint, link_notes, make_plan

from .prepare import LocalPrepared, here, writing

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from paceline.backends.base import Prepared, ProgressReporter
    from paceline.backends.foreground import RankStreams
    from paceline.contract.records import CodeRecord
    from paceline.job.spec import JobSpec


def start(
    prepared: Prepared,
    progress: ProgressReporter,
    *,
    lifeline: socket.socket | None = None,
    rank_streams: RankStreams | None = None,
) -> make.Made:
    """Start a job."""
    assert isinstance(prepared, LocalPrepared)
    spec, plan = prepared.asked, prepared.plan
    make_private(jobs_folder().parent)
    if prepared.environments is not None:
        from paceline.backends.environments.machines import this_machine

        machine = this_machine()
        python = prepared.environments.build([machine], progress)[machine].python
        with refusals():
            plan = make_plan(plan.home, here(python), plan.order)
    _warn_of_no_token(spec, progress)
    lines = link_notes(plan.home, plan.order.job)
    if plan.order.data:
        from paceline.node.machine.volumes import notes

        lines += notes(plan.order.data)
    for line in lines:
        progress.say(line)
    stdin = None if rank_streams is None else rank_streams.stdin
    reader = None if stdin is None else (stdin, f"/proc/{os.getpid()}/fd/0")  # the job ends with this process
    plan = replace(plan, order=replace(plan.order, rank_streams=rank_streams, stdin=reader))
    with _moved(prepared, progress) as moved, writing(spec.log_dir), refusals():
        for name in names(spec):
            try:
                named = plan.named(name)
                if spec.code is not None and spec.resume_from is not None:
                    progress(f"copying {spec.resume_from}", 0, None)
                with make.making(named) as new:
                    code = moved.code
                    if new.code is not None and moved.archive is not None:
                        with moved.archive.open("rb") as archive:
                            unpack(archive, new.code)
                    elif new.code is not None:
                        with building(new.code) as folder:
                            code = fetched(spec, folder, progress)
                    with moved.checkpoint.open("rb") if moved.checkpoint else contextlib.nullcontext() as checkpoint:
                        return new.start(code, lifeline, checkpoint)
            except Taken as error:
                taken = error
        raise taken


class _Moved(NamedTuple):
    """What a job gets of one on another target: the record of its code, and archives of that and of its checkpoint."""

    code: CodeRecord | None = None
    archive: Path | None = None
    checkpoint: Path | None = None


@contextlib.contextmanager
def _moved(prepared: LocalPrepared, progress: ProgressReporter) -> Iterator[_Moved]:
    """Get what the job goes on with, if that is on another target; the archives are here until the end of the block."""
    export, order = prepared.export, prepared.plan.order
    if export is None:
        yield _Moved()
        return
    for line in moving.notes(prepared.asked, export):
        progress.say(line)
    with tempfile.TemporaryDirectory() as folder:
        archive, checkpoint = Path(folder, "code.tar"), Path(folder, "checkpoint.tar")
        code = moving.fetched_code(export, archive, progress)
        is_needed = order.brought is not None and order.brought.into != ""
        if is_needed and not has_checkpoint(order, Path(order.job.working_dir)):
            moving.fetched_checkpoint(export, checkpoint, progress)
        yield _Moved(code, archive, checkpoint if checkpoint.exists() else None)


def _warn_of_no_token(spec: JobSpec, progress: ProgressReporter) -> None:
    """Say on the machine where others join that anyone may, if that is so."""
    meeting = spec.rendezvous
    address = meeting.main_address
    if address is None or os.environ.get("PACELINE_TOKEN"):  # an empty one is none
        return
    from paceline.node.machine.network import is_here, is_loopback

    is_first = meeting.node_rank == 0 or (meeting.node_rank is None and is_here(address))
    if is_first and not is_loopback(meeting.local_address or address):
        who = "anyone who can connect" if meeting.run_id is None else "anyone who knows --rdzv-id and can connect"
        progress.say(
            f"{who} to {join_address(address, meeting.main_port or MAIN_PORT)} may join this job; "
            "set PACELINE_TOKEN to a secret on all its machines"
        )
