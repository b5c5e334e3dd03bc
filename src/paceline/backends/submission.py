"""What every backend does on the client before it starts a job: check it, choose names, copy the code."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from paceline.contract.code_folder import source_name
from paceline.job import settings_files
from paceline.job.errors import UserError
from paceline.job.paths import jobs_folder, targets_with
from paceline.job.spec import NAME, JobSpec
from paceline.node.ranks.placement import CHOSEN

from .refusals import kind_of_program

if TYPE_CHECKING:
    from collections.abc import Iterator
    from gzip import GzipFile

    from paceline.contract.records import CodeRecord, DataRecord

    from .base import ProgressReporter


class NameTaken(UserError):
    """A job of this name exists."""


# -- what is refused before anything is started ------------------------------------------------------------------------


class Checked(NamedTuple):
    """A job that can run, as far as this machine can tell.

    Attributes:
        spec: the job as it will be stored.
        name: its name, with a placeholder for what is chosen at the start.
        source: the folder on this machine of which its code will be a copy; None if there is none, and for code that
            comes from another job or from elsewhere.
    """

    spec: JobSpec
    name: str
    source: Path | None


def checked(spec: JobSpec, *, detached: bool) -> Checked:
    """Check a job; changes and fetches nothing."""
    is_open = spec.name.endswith("-")
    if spec.name:
        _check_name(f"{spec.name}1" if is_open else spec.name)
    name = f"{spec.name}{CHOSEN}" if is_open else spec.name or spec.new_name()[:-5] + CHOSEN
    for secret in spec.secrets:
        if secret not in os.environ:
            raise UserError(f"secret {secret} is not set in your environment; export it, then submit again")
    spec = spec.changed({"detached": detached})
    if spec.code is None:
        return Checked(spec, name, None)
    from paceline.job.code import bring  # takes long to import

    here = _current_folder()
    source = bring.find(spec.code, here) if spec.resume_from is None else None
    if spec.script is not None and os.path.isabs(spec.script):  # from now on it is the one in the copy
        spec = spec.changed({"script": _in_copy(spec.script, spec, here)})
    return Checked(spec, name, source)


def _in_copy(script: str, spec: JobSpec, here: Path) -> str:
    """The path within the copy of the code of a script with an absolute path: in its source, or in the copy itself."""
    from paceline.job.code import git_source

    assert spec.code is not None
    source = spec.code.source or "."
    if spec.code.mode == "git":
        source = git_source.resolve(source, here).url
    folders = [(here / source).resolve()]
    if spec.working_dir != ".":
        folders += [here / spec.working_dir / "code" / name for name in (source_name(source), spec.name) if name]
    for path, folder in ((Path(script).resolve(), folders[0]), *((Path(script), it) for it in folders[1:])):
        with contextlib.suppress(ValueError, OSError):
            return str(path.relative_to(folder))
    what = spec.code.source or "this folder"
    copy = f", nor in its copy, {folders[1]}" if folders[1:] else ""
    raise UserError(f"script {script} is not in {what}, which is copied{copy}; name one that is")


def check_script(spec: JobSpec, source: Path | None) -> None:
    """Check that the folder that the code will be copied from has the script: nodes cannot look for it there."""
    if source is not None and spec.script is not None:
        kind_of_program(spec.script, source)


def kept_warm(spec: JobSpec) -> JobSpec:
    """A job that leaves a process for the next one, if it or the settings say so."""
    if spec.keep_warm is not None or not settings_files.exist():
        return spec
    from paceline.job.settings import load

    said = load().defaults.keep_warm
    return spec if said is None else spec.changed({"keep_warm": said})


def volumes_of(spec: JobSpec) -> tuple[DataRecord, ...]:
    """The paths of a job's volumes on its nodes, from the settings; see `volumes.sources`."""
    if not spec.data:
        return ()
    from paceline.job.settings import load

    from .volumes import sources

    return sources(spec.data, load())


def _current_folder() -> Path:
    """The current folder."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UserError("the folder that you are in was deleted; change to one that exists") from None


# -- code --------------------------------------------------------------------------------------------------------------


def fetched(spec: JobSpec, destination: Path, progress: ProgressReporter) -> CodeRecord:
    """Copy the code of a job to an empty folder; returns the record of it."""
    assert spec.code is not None
    from paceline.job.code import bring
    from paceline.node.telemetry import origin

    here = _current_folder()
    record: CodeRecord = bring.fetch(
        spec.code, here, destination, progress, progress.say, credentials=spec.git_credentials
    )
    if spec.code.mode != "git":
        with contextlib.suppress(OSError):
            origin.note(destination, bring.find(spec.code, here))
    return record


def packed(spec: JobSpec, archive: IO[bytes] | GzipFile, progress: ProgressReporter) -> CodeRecord:
    """Write the code of a job to an archive (tar), for machines elsewhere; returns the record of it."""
    import tarfile  # these take long to import, and a job on this machine needs neither
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder, "code")
        code.mkdir(mode=0o700)
        record = fetched(spec, code, progress)
        if spec.script is not None:
            try:
                kind_of_program(spec.script, code)
            except UserError as error:
                raise UserError(str(error).replace(str(code), f"the copy of {record['source']}")) from None
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.add(code, arcname=".")
    return record


# -- names -------------------------------------------------------------------------------------------------------------


def names(spec: JobSpec) -> Iterator[str]:
    """The names that a job may get, each if those before it are taken.

    One that ends in '-' gets the next free number, an empty one is generated. A number that another target has is not
    free: verbs that name the job would find that one.
    """
    if not spec.name.endswith("-"):
        yield spec.name or spec.new_name()
        return
    for number in itertools.count(2 if spec.resume_from else 1):
        _check_name(name := f"{spec.name}{number}")
        if not is_known(name):
            yield name


def is_known(name: str) -> bool:
    """Whether a job of this name is here, or was submitted from here to anywhere."""
    return os.path.lexists(jobs_folder() / name) or bool(targets_with(name))


def _check_name(name: str) -> None:
    """Check a job's name."""
    if not NAME.fullmatch(name):
        raise UserError(f"{name!r} is not a job name; use up to 63 letters, digits, '.', '_' and '-'")
