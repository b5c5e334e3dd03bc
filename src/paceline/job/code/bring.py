"""Copies a job's code: from a git repository, by rsync, or as a snapshot of a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from paceline.job.errors import UserError, nearest
from paceline.job.secret_values import split_source
from paceline.job.spec import Code, Mode

from . import git, git_source, rsync, snapshot
from .transfer import printable, require

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.contract.records import CodeRecord

    from .transfer import OnProgress

_MODES = get_args(Mode)


def parse(mode: str | None, source: str | None) -> Code | None:
    """What `--sync-mode` and `--sync-source` ask for; None when neither is given."""
    if mode is None:
        if source is None:
            return None
        raise UserError("--sync-source without --sync-mode; add --sync-mode git, rsync or snapshot")
    if mode not in _MODES:
        raise UserError(f"unknown --sync-mode {mode!r}; {nearest(mode, _MODES)}")
    code = Code(mode=mode, source=source)  # type: ignore[arg-type]
    shown = split_source(source)[0] if mode == "git" and source else source
    check(code.changed({"source": shown}))
    return code


def check(code: Code) -> None:
    """Check the source without looking at any file or host; also for jobs from a file or from Python."""
    _check_named(code)
    if code.mode == "git":
        git_source.check(code.source or "")
    elif code.mode == "rsync":
        rsync.check(code.source or "")


def _check_named(code: Code) -> None:
    if not code.source:
        if code.source is None and code.mode == "snapshot":
            return
        wanted = {"git": "URL[@ref] of a repository", "rsync": "a folder or HOST:FOLDER", "snapshot": "a folder"}
        raise UserError(f"--sync-mode {code.mode} without --sync-source; name {wanted[code.mode]}")
    if "\0" in code.source:
        raise UserError("--sync-source contains a zero byte; write it again")


def find(code: Code, folder: Path) -> Path | None:
    """Check the source without copying or asking another machine; returns the folder, if it is one here."""
    _check_named(code)
    if code.mode == "git":
        git_source.resolve(code.source or "", folder)
        require("git")
        return None
    if code.mode == "rsync":
        found = rsync.find(code.source or "", folder)
        require("rsync")
        return found
    return snapshot.existing_folder(code.source or ".", folder)


def fetch(
    code: Code,
    folder: Path,
    destination: Path,
    progress: OnProgress,
    warn: Callable[[str], None] = lambda line: None,
    *,
    credentials: Mapping[str, str] = os.environ,
) -> CodeRecord:
    """Copy the code into an empty folder; returns the record of the copy."""
    _check_named(code)
    folder = Path(os.path.abspath(folder))
    try:
        if code.mode == "git":
            fetched = git.fetch(code.source or "", folder, destination, progress, credentials)
        elif code.mode == "rsync":
            fetched = rsync.fetch(code.source or "", folder, destination, progress, warn)
        else:
            fetched = snapshot.fetch(code.source or ".", folder, destination, progress, warn)
    except OSError as error:
        raise UserError(
            f"cannot write the job's code to {printable(destination.parent)}: {error.strerror}; "
            "check that there is space and that you may write there, or choose another working dir"
        ) from None
    return {"mode": code.mode, **fetched}
