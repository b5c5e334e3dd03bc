"""Submits a job to this machine: everything that can be wrong is found before anything is started."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.backends.refusals import refusals
from paceline.backends.submission import NameTaken, bring, check_secrets, in_copy, named, named_as_copy
from paceline.job.errors import UserError
from paceline.job.paths import jobs_folder
from paceline.job.spec import NAME, JobSpec
from paceline.node.planning import fitting
from paceline.node.rundir.directory import RunDirectory
from paceline.node.store.lifecycle import take_checkpoints
from paceline.node.store.records import is_job

from . import prepare
from .start import folder_of, staged, start

if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Callable

    from paceline.backends.base import Progress
    from paceline.backends.volumes import Source
    from paceline.node.rundir.staging import Staging
    from paceline.node.spec import NodeSpec


@dataclass(frozen=True)
class Launched:
    """A job that was just started: what was asked for, complete; this node's part; its folder and its agent."""

    spec: JobSpec
    node: NodeSpec
    directory: RunDirectory
    agent: subprocess.Popen[bytes]


def launch(
    spec: JobSpec,
    progress: Progress,
    *,
    lifeline: socket.socket | None = None,
    split_streams: Callable[[JobSpec], tuple[int, ...]] = lambda _: (),
) -> Launched:
    """Start a job.

    Args:
        spec: what the user asked for.
        progress: hears how far it is.
        lifeline: the job ends when the other end closes; None for one that outlives its client.
        split_streams: the local ranks of the completed job whose stderr is kept apart.

    Raises:
        NameTaken: another job has the name.
        UserError: the job cannot run here.
    """
    spec = named(spec).model_copy(update={"detached": lifeline is None})
    if not NAME.fullmatch(spec.name):
        raise UserError(f"{spec.name!r} is no name for a job; take letters, digits, '.', '_' and '-'")
    if spec.resume_from is not None and not is_job(jobs_folder() / spec.resume_from):
        raise UserError(f"no job {spec.resume_from!r} to resume from; see paceline list -A")
    for taken in (jobs_folder() / spec.name, folder_of(spec)):
        if os.path.lexists(taken):
            raise NameTaken(spec.name, taken)
    check_secrets(spec)
    sources = _sources(spec)
    asked = spec
    if spec.code is None:  # a job that cannot run leaves nothing, not even a folder
        spec = prepare.complete(spec)
        split = split_streams(spec)
    _check_checkpoint_dir(spec)
    for flag, value in (("--image", spec.image), ("--queue", spec.queue)):
        if value is not None:
            progress.say(f"{flag} {value} does nothing on this machine, which has no {flag[2:]}s")
    record: dict[str, Any] = {"data": [asdict(source) for source in sources]}
    with contextlib.ExitStack() as stack:
        staging = stack.enter_context(staged(spec))
        folder = None
        if spec.code is not None:
            made, folder = _places(spec, staging.directory.path)
            asked = spec = in_copy(spec)
            record["code"] = {**bring(spec, made, progress), "path": str(folder)}
            stack.callback(_unless_started, made, staging)
            with named_as_copy(made, record["code"]):
                spec = prepare.complete(spec, made)
            split = split_streams(spec)
        node = prepare.place(spec, split, folder=folder, sources=sources)
        if spec.resume_from is not None:
            take_checkpoints(jobs_folder() / spec.resume_from, staging.directory.path)
        # What was asked for, not what was found out: another time that may be something else.
        stored = asked.model_copy(update={"working_dir": spec.working_dir, "devices": spec.devices})
        directory, agent = start(staging, stored, node, record, lifeline)
    return Launched(spec, node, directory, agent)


def _check_checkpoint_dir(spec: JobSpec) -> None:
    """See that nobody else has the folder for checkpoints. One in the job's own copy of its code is new.

    One of several nodes that are started by hand may come into a job that has the folder already.

    Raises:
        UserError: somebody has.
    """
    job = spec.model_dump()
    is_new = spec.code is not None and not os.path.isabs(spec.checkpoint_dir or "")
    if not is_new and fitting.node_range(job)[1] == 1:
        with refusals():
            fitting.check_checkpoint_dir(job)


def _sources(spec: JobSpec) -> list[Source]:
    if not spec.data:
        return []
    from paceline.backends.volumes import resolve
    from paceline.job.settings import load

    return resolve(spec.data, load())


def _places(spec: JobSpec, hidden: Path) -> tuple[Path, Path]:
    """Where to put the code while the job is being made in a hidden folder, and where it is afterwards."""
    below = Path("code") / spec.name
    if spec.working_dir == ".":
        return hidden / below, folder_of(spec) / below
    place = prepare.working_dir(spec) / below
    if place.exists():
        raise UserError(f"{place} is there already; remove it, or choose another --name or --working-dir")
    return place, place


def _unless_started(made: Path, staging: Staging) -> None:
    """Remove code that no job has come to need."""
    from paceline.job.code.bring import discard

    if not staging.is_settled:
        discard(made)
