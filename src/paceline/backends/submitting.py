"""Submits a job to this machine: everything that can be wrong is found before anything is started."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.job.errors import UserError
from paceline.job.home import jobs_folder
from paceline.job.spec import NAME, JobSpec, new_name
from paceline.node.launching import places_of_code, take_checkpoints
from paceline.node.records import is_job
from paceline.node.run_directory import RunDirectory, read_json

from . import prepare
from .refusals import refusals
from .starting import NameTaken, folder_of, staged, start

if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Callable

    from paceline.node.run_directory import Staging
    from paceline.node.spec import NodeSpec

    from .base import Progress
    from .volumes import Source


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
    taken = jobs_folder() / spec.name
    if os.path.lexists(taken):
        raise NameTaken(spec.name, taken)
    check_secrets(spec)
    sources = _sources(spec)
    asked = spec
    if spec.code is None:  # a job that cannot run leaves nothing, not even a folder
        spec = prepare.complete(spec)
        split = split_streams(spec)
    for flag, value in (("--image", spec.image), ("--queue", spec.queue)):
        if value is not None:
            progress.say(f"{flag} {value} does nothing on this machine, which has no {flag[2:]}s")
    record: dict[str, Any] = {"data": [asdict(source) for source in sources]}
    with contextlib.ExitStack() as stack:
        staging = stack.enter_context(staged(spec))
        folder = None
        if spec.code is not None:
            wanted = None if spec.working_dir == "." else prepare.working_dir(spec)
            with refusals():
                made, folder = places_of_code(spec.name, wanted, staging.directory.path, folder_of(spec))
            stack.callback(_unless_started, made, staging)
            asked = spec = _relative(spec)
            record["code"] = {**_bring(spec, made, progress), "path": str(folder)}
            try:
                spec = prepare.complete(spec, made)
            except UserError as error:  # that folder is hidden, and will be gone
                raise UserError(str(error).replace(str(made), f"the copy of {record['code']['source']}")) from None
            split = split_streams(spec)
        node = prepare.place(spec, split, folder=folder, sources=sources)
        if spec.resume_from is not None:
            take_checkpoints(jobs_folder() / spec.resume_from, staging.directory.path)
        # What was asked for, not what was found out: another time that may be something else.
        stored = asked.model_copy(update={"working_dir": spec.working_dir, "devices": spec.devices})
        directory, agent = start(staging, stored, node, record, lifeline)
    return Launched(spec, node, directory, agent)


def _sources(spec: JobSpec) -> list[Source]:
    if not spec.data:
        return []
    from paceline.job.settings import load

    from .volumes import resolve

    return resolve(spec.data, load())


def _relative(spec: JobSpec) -> JobSpec:
    """The job with its script named as in the copy of the code, not as in what is copied."""
    assert spec.code is not None
    if spec.script is None or not os.path.isabs(spec.script):
        return spec
    source = Path.cwd() / (spec.code.source or ".")
    try:
        return spec.model_copy(update={"script": str(Path(spec.script).resolve().relative_to(source.resolve()))})
    except (ValueError, OSError):
        raise UserError(
            f"script {spec.script} is not in {spec.code.source or 'this folder'}, which is copied; name one that is"
        ) from None


def _bring(spec: JobSpec, destination: Path, progress: Progress) -> dict[str, Any]:
    """Copy the code of a job; one that goes on with another job's gets it as that one has left it."""
    assert spec.code is not None
    from paceline.job.code import copy, fetch

    if spec.resume_from is None:
        return fetch(spec.code, Path.cwd(), destination, progress, progress.say)
    old = (read_json(RunDirectory(jobs_folder() / spec.resume_from).job) or {}).get("code")
    if old is None or not Path(old["path"]).is_dir():
        raise UserError(f"the code of job {spec.resume_from} is gone; submit the job anew")
    copy(Path(old["path"]), destination, progress)
    return {**old}


def _unless_started(made: Path, staging: Staging) -> None:
    """Remove code that no job has come to need."""
    from paceline.job.code import discard

    if not staging.is_settled:
        discard(made)


def check_secrets(spec: JobSpec) -> None:
    """Whether a job can be given its secrets.

    Raises:
        UserError: one is not there.
    """
    missing = [name for name in spec.secrets if name not in os.environ]
    if missing:
        raise UserError(f"secret {missing[0]} is not set in your environment; export it, then submit again")


def named(spec: JobSpec) -> JobSpec:
    """The job with a name, made up where it has none."""
    stem = spec.target.rpartition(".")[2] if spec.kind == "module" else Path(spec.target).stem
    return spec if spec.name else spec.model_copy(update={"name": new_name(stem)})
