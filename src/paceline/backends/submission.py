"""What every backend does on the client before it starts a job: check the name, secrets and volumes; get the code."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.job import settings_files
from paceline.job.errors import UserError
from paceline.job.paths import jobs_folder, targets_with
from paceline.job.spec import NAME, JobSpec, new_name
from paceline.node.planning.script import program_kind
from paceline.node.ranks.placement import CHOSEN
from paceline.node.store.code_folder import record_made

from .refusals import refusals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .base import ProgressReporter

Started = TypeVar("Started")


class NameTaken(UserError):
    """A job of this name exists."""


# -- what is refused before anything is started ------------------------------------------------------------------------


def checked(spec: JobSpec, *, detached: bool) -> JobSpec:
    """Check a job, and return it as it will be stored; changes and fetches nothing.

    Args:
        spec: what the user asked for.
        detached: whether it goes on without the client.

    Raises:
        UserError: it cannot run on any machine, as far as this machine can tell.
    """
    if spec.name:
        _check_name(f"{spec.name}1" if spec.name.endswith("-") else spec.name)
    for name in spec.secrets:
        if name not in os.environ:
            raise UserError(f"secret {name} is not set in your environment; export it, then submit again")
    spec = spec.model_copy(update={"detached": detached})
    if spec.code is None:
        return spec
    from paceline.job.code.bring import check_source

    if spec.resume_from is None:
        check_source(spec.code, _current_folder())
    return _in_copy(spec)


def kept_warm(spec: JobSpec) -> JobSpec:
    """A job that leaves a process for the next one, if it or the settings say so."""
    if spec.keep_warm is not None or not settings_files.exist():
        return spec
    from paceline.job.settings import load

    seconds = load().defaults.keep_warm
    return spec if seconds is None else spec.model_copy(update={"keep_warm": seconds})


def source_of(spec: JobSpec) -> Path | None:
    """The local folder of which the job's code will be a copy; None if there is none."""
    if spec.code is None or spec.code.mode == "git":
        return None
    source = _current_folder() / os.path.expanduser(spec.code.source or ".")
    return source if source.is_dir() else None  # else it is on another machine


def _in_copy(spec: JobSpec) -> JobSpec:
    """The job with the path of its script in the copy of the code, instead of in the source.

    Raises:
        UserError: the source does not contain it, as far as can be seen before copying.
    """
    assert spec.code is not None
    spec, source = _relative(spec), source_of(spec)
    if source is not None and spec.resume_from is None and spec.script is not None:
        with refusals():
            program_kind(spec.script, source)
    return spec


def _relative(spec: JobSpec) -> JobSpec:
    assert spec.code is not None
    if spec.script is None or not os.path.isabs(spec.script):
        return spec
    source = _current_folder() / (spec.code.source or ".")
    try:
        return spec.model_copy(update={"script": str(Path(spec.script).resolve().relative_to(source.resolve()))})
    except (ValueError, OSError):
        raise UserError(
            f"script {spec.script} is not in {spec.code.source or 'this folder'}, which is copied; name one that is"
        ) from None


def _current_folder() -> Path:
    """The current folder.

    Raises:
        UserError: it was deleted.
    """
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UserError("the folder that you are in was deleted; change to one that exists") from None


def as_planned(kind: type[JobSpec], job: Mapping[str, Any]) -> JobSpec:
    """A job as a node has completed it; its name and framework may be placeholders."""
    open_ = {"name": job["name"], "framework": job["framework"]}
    return kind.from_stored({**job, "name": "", "framework": None}).model_copy(update=open_)


# -- code --------------------------------------------------------------------------------------------------------------


def fetched(spec: JobSpec, destination: Path, progress: ProgressReporter) -> dict[str, Any]:
    """Copy the code of a job to a folder that does not exist yet; returns the record of it.

    Raises:
        UserError: it cannot be copied, or lacks the job's script.
    """
    assert spec.code is not None
    from paceline.job.code.bring import fetch

    found = fetch(spec.code, _current_folder(), destination, progress, progress.say, credentials=spec.git_credentials)
    record_made(destination, destination.lstat().st_ino)
    if spec.script is not None:
        try:
            with refusals():
                program_kind(spec.script, destination)
        except UserError as error:
            raise UserError(str(error).replace(str(destination), f"the copy of {found['source']}")) from None
    return found


# -- names -------------------------------------------------------------------------------------------------------------


def shown_name(spec: JobSpec) -> str:
    """The job's name for a dry run, with a placeholder for what is chosen at the start."""
    if not spec.name:
        return new_name(_stem(spec))[:-5] + CHOSEN
    return f"{spec.name}{CHOSEN}" if spec.name.endswith("-") else spec.name


def start_named(spec: JobSpec, start: Callable[[str], Started]) -> Started:
    """Start a job under its name: one that ends in '-' gets the next free number, an empty one is generated.

    Args:
        spec: the job.
        start: starts it under a name, or raises `NameTaken`.

    Raises:
        UserError: it cannot be started.
        NameTaken: another job has the name that the user gave it.
    """
    if not spec.name.endswith("-"):
        return start(spec.name or new_name(_stem(spec)))
    for number in itertools.count(2 if spec.resume_from else 1):
        _check_name(name := f"{spec.name}{number}")
        if spec.resume_from is not None and _is_known(name):  # wherever it is, the two would be mixed up
            continue
        with contextlib.suppress(NameTaken):
            return start(name)
    raise AssertionError  # there is always another number


def _is_known(name: str) -> bool:
    """Whether a job of this name is on this machine, or was submitted from here to another one."""
    return os.path.lexists(jobs_folder() / name) or bool(targets_with(name))


def _check_name(name: str) -> None:
    """Check a job's name.

    Raises:
        UserError: it is not valid.
    """
    if not NAME.fullmatch(name):
        raise UserError(f"{name!r} is not a job name; use up to 63 letters, digits, '.', '_' and '-'")


def _stem(spec: JobSpec) -> str:
    return spec.target.rpartition(".")[2] if spec.kind == "module" else Path(spec.target).stem
