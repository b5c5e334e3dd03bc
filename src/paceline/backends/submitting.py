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
from paceline.node.launching import take_checkpoints
from paceline.node.records import is_job
from paceline.node.run_directory import RunDirectory, read_json
from paceline.node.script import program_kind

from . import prepare
from .refusals import refusals
from .starting import NameTaken, folder_of, staged, start

if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Callable, Iterator, Mapping

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
            made, folder = _places(spec, staging.directory.path)
            stack.callback(_unless_started, made, staging)
            asked = spec = in_copy(spec)
            record["code"] = {**_bring(spec, made, progress), "path": str(folder)}
            with _told_as_copy(made, record["code"]):
                spec = prepare.complete(spec, made)
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


def _places(spec: JobSpec, hidden: Path) -> tuple[Path, Path]:
    """Where to put the code while the job is being made in a hidden folder, and where it is afterwards."""
    below = Path("code") / spec.name
    if spec.working_dir == ".":
        return hidden / below, folder_of(spec) / below
    place = prepare.working_dir(spec) / below
    if place.exists():
        raise UserError(f"{place} is there already; remove it, or choose another --name or --working-dir")
    return place, place


def in_copy(spec: JobSpec) -> JobSpec:
    """The job with its script named as in the copy of the code, not as in what is copied.

    Raises:
        UserError: it is not in what is copied, as far as can be seen before that is done.
    """
    code, spec = spec.code, _relative(spec)
    if code is not None and code.mode == "snapshot" and spec.resume_from is None and spec.script is not None:
        source = Path.cwd() / os.path.expanduser(code.source or ".")
        if source.is_dir():
            with refusals():
                program_kind(spec.script, source)
    return spec


def _relative(spec: JobSpec) -> JobSpec:
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


def fetched(spec: JobSpec, destination: Path, progress: Progress) -> dict[str, Any]:
    """Bring the code of a job here, to be sent to other machines; returns what is known of it.

    Raises:
        UserError: it cannot be brought, or lacks the job's script.
    """
    found = _bring(spec, destination, progress)
    if spec.script is not None:
        with _told_as_copy(destination, found), refusals():
            program_kind(spec.script, destination)
    return found


@contextlib.contextmanager
def _told_as_copy(made: Path, code: Mapping[str, Any]) -> Iterator[None]:
    """A folder that is hidden, and will be gone, is told as the copy of what it is.

    Raises:
        UserError: the same as in the block.
    """
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace(str(made), f"the copy of {code['source']}")) from None


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
