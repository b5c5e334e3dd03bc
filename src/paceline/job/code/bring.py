"""Brings a job's code to its place: from a git repository, by rsync, or as a snapshot of a folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from paceline.job.errors import UserError, nearest
from paceline.job.spec import Code

from . import git, git_source, rsync, snapshot
from .markers import building_name, marker_of, write_gitignore
from .transfer import printable, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .transfer import Progress

_ABANDONED = 86400.0  # seconds after which nobody is still building
_MODES = get_args(Code.model_fields["mode"].annotation)


def parse(mode: str | None, source: str | None) -> Code | None:
    """What `--sync-mode` and `--sync-source` ask for; None when neither is given.

    Raises:
        UserError: the mode is unknown, one is given without the other, or the source would smuggle something in.
    """
    if mode is None:
        if source is None:
            return None
        raise UserError("--sync-source without --sync-mode; add --sync-mode git, rsync or snapshot")
    if mode not in _MODES:
        raise UserError(f"unknown --sync-mode {mode!r}; {nearest(mode, _MODES)}")
    code = Code(mode=mode, source=source)  # type: ignore[arg-type]
    check(code)
    return code


def check(code: Code) -> None:
    """Refuse what can be refused without looking anywhere: also for jobs that come from a file or from Python.

    Raises:
        UserError: the source is missing, of an unknown kind, holds a password, or would smuggle something in.
    """
    if not code.source:
        if code.source is None and code.mode == "snapshot":
            return
        wanted = {"git": "URL[@ref] of a repository", "rsync": "a folder or HOST:FOLDER", "snapshot": "a folder"}
        raise UserError(f"--sync-mode {code.mode} without --sync-source; name {wanted[code.mode]}")
    if "\0" in code.source:
        raise UserError("--sync-source holds a zero byte; write it anew")
    if code.mode == "git":
        git_source.check(code.source)
    elif code.mode == "rsync":
        rsync.check(code.source)


def check_source(code: Code, folder: Path) -> None:
    """Refuse what can be refused without bringing anything; connects to no other machine.

    Args:
        code: what to bring.
        folder: what relative paths are relative to.

    Raises:
        UserError: see `check`; or what is on this machine is not there, or what brings it is not installed.
    """
    check(code)
    if code.mode == "git":
        require("git")
        git_source.resolve(code.source or "", folder)
    elif code.mode == "rsync":
        require("rsync")
        rsync.find(code.source or "", folder)
    else:
        snapshot.existing_folder(code.source or ".", folder)


def fetch(
    code: Code, folder: Path, destination: Path, progress: Progress, warn: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Bring the code to `destination`, all of it or nothing.

    Args:
        code: what to bring.
        folder: what relative paths are relative to, and what a snapshot is taken of.
        destination: a folder that is not there yet.
        progress: called with what is being done, how much of it is done, and how much there is, or None.
        warn: called with a line that the user should read.

    Returns:
        For the record: mode, source without credentials, for git ref and commit, files, bytes.

    Raises:
        UserError: it cannot be brought; nothing is left at `destination`.
    """
    check(code)
    folder = Path(os.path.abspath(folder))
    with _building(destination) as building:
        if code.mode == "git":
            fetched = git.fetch(code.source or "", folder, building, progress)
        elif code.mode == "rsync":
            fetched = rsync.fetch(code.source or "", folder, building, progress, warn)
        else:
            fetched = snapshot.fetch(code.source or ".", folder, building, progress, warn)
    return {"mode": code.mode, **fetched}


@contextlib.contextmanager
def _building(destination: Path) -> Iterator[Path]:
    """A folder that becomes `destination` at the end of the block; nothing is left if that fails."""
    destination = Path(os.path.abspath(destination))
    if os.path.lexists(destination):
        raise UserError(f"{printable(destination)} is there already; choose another job name")
    with contextlib.ExitStack() as undo:
        try:
            building = _begin(destination, undo)
            yield building
            os.rename(building, destination)
        except OSError as error:
            raise UserError(
                f"cannot write the job's code to {printable(destination)}: {error.strerror}; "
                "see to it that there is space and you may write there, or choose another working dir"
            ) from None
        undo.pop_all()


def _begin(destination: Path, undo: contextlib.ExitStack) -> Path:
    """An empty folder beside the destination to build it in; `undo` takes everything back that was made for it.

    Raises:
        OSError: it cannot be made.
    """
    parent = destination.parent
    missing = [p for p in (parent, *parent.parents) if not p.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        undo.callback(_remove_if_empty, path)
    if missing:  # it is ours alone: git need not look into it
        undo.callback(_remove_if_alone, write_gitignore(parent))
    for left in parent.glob(".*.paceline.????????"):  # by a client that was killed
        with contextlib.suppress(OSError):  # another client has just finished
            if time.time() - left.stat().st_mtime > _ABANDONED:
                shutil.rmtree(left, ignore_errors=True)
    marker = marker_of(destination)
    if not os.path.lexists(marker):  # else whoever has it brought sees to that
        marker.touch()
        undo.callback(marker.unlink, missing_ok=True)
    building = parent / building_name(destination.name, secrets.token_hex(4))
    undo.callback(shutil.rmtree, building, ignore_errors=True)
    building.mkdir(mode=0o700)
    return building


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _remove_if_alone(file: Path) -> None:
    """Remove a file, unless another job has come to use its folder meanwhile."""
    with contextlib.suppress(OSError):
        if os.listdir(file.parent) == [file.name]:
            file.unlink()
