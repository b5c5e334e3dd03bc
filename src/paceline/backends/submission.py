"""What every backend does before it starts a job: its name, its secrets, its code."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.job.errors import UserError
from paceline.job.paths import jobs_folder
from paceline.job.spec import JobSpec, new_name
from paceline.node.planning.script import program_kind
from paceline.node.rundir.directory import RunDirectory, read_json

from .refusals import refusals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.job.spec import JobSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .base import Progress


class NameTaken(UserError):
    """A job of this name exists."""

    def __init__(self, name: str, path: Path) -> None:
        if path.is_symlink() or RunDirectory(path).is_ours:
            super().__init__(f"a job named {name} has its files in {path}; choose another --name, or delete that job")
        else:
            super().__init__(f"{path} is there already, and no job's; choose another --name, or move it away")


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


def bring(spec: JobSpec, destination: Path, progress: Progress) -> dict[str, Any]:
    """Copy the code of a job; one that goes on with another job's gets it as that one has left it."""
    assert spec.code is not None
    from paceline.job.code.bring import copy, fetch

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
    found = bring(spec, destination, progress)
    if spec.script is not None:
        with named_as_copy(destination, found), refusals():
            program_kind(spec.script, destination)
    return found


@contextlib.contextmanager
def named_as_copy(made: Path, code: Mapping[str, Any]) -> Iterator[None]:
    """A folder that is hidden, and will be gone, is told as the copy of what it is.

    Raises:
        UserError: the same as in the block.
    """
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace(str(made), f"the copy of {code['source']}")) from None


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
