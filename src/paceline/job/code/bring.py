"""Copies a job's code: from a git repository, by rsync, or as a snapshot of a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from paceline.job.errors import UserError, nearest
from paceline.job.secret_values import split_source
from paceline.job.spec import Code

from . import git, git_source, rsync, snapshot
from .markers import building_name, marker_of, write_gitignore
from .transfer import printable, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .transfer import OnProgress

_ABANDONED = 86400.0  # seconds after which a folder is certainly not being built any more
_MARK = b"The code of a job, made by paceline; `paceline delete` removes it with the job.\n"
_HIDDEN_MARKER = ".paceline"  # in a folder in which code is built
_MOST = 4096  # bytes of a marker
_MODES = get_args(Code.model_fields["mode"].annotation)


def parse(mode: str | None, source: str | None) -> Code | None:
    """What `--sync-mode` and `--sync-source` ask for; None when neither is given.

    Raises:
        UserError: the mode is unknown, one is given without the other, or the source is malicious.
    """
    if mode is None:
        if source is None:
            return None
        raise UserError("--sync-source without --sync-mode; add --sync-mode git, rsync or snapshot")
    if mode not in _MODES:
        raise UserError(f"unknown --sync-mode {mode!r}; {nearest(mode, _MODES)}")
    code = Code(mode=mode, source=source)  # type: ignore[arg-type]
    shown = split_source(source)[0] if mode == "git" and source else source
    check(code.model_copy(update={"source": shown}))
    return code


def check(code: Code) -> None:
    """Check the source without looking at any file or host; also for jobs from a file or from Python.

    Raises:
        UserError: the source is missing, of an unknown kind, contains a password, or is malicious.
    """
    if not code.source:
        if code.source is None and code.mode == "snapshot":
            return
        wanted = {"git": "URL[@ref] of a repository", "rsync": "a folder or HOST:FOLDER", "snapshot": "a folder"}
        raise UserError(f"--sync-mode {code.mode} without --sync-source; name {wanted[code.mode]}")
    if "\0" in code.source:
        raise UserError("--sync-source contains a zero byte; write it again")
    if code.mode == "git":
        git_source.check(code.source)
    elif code.mode == "rsync":
        rsync.check(code.source)


def check_source(code: Code, folder: Path) -> None:
    """Check the source without copying; connects to no other machine.

    Args:
        code: what to copy.
        folder: base of relative paths.

    Raises:
        UserError: see `check`; or a local source does not exist, or git or rsync is not installed.
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
    code: Code,
    folder: Path,
    destination: Path,
    progress: OnProgress,
    warn: Callable[[str], None] = lambda line: None,
    *,
    credentials: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Copy the code to `destination`, all of it or nothing.

    Args:
        code: what to copy.
        folder: base of relative paths, and the folder of a snapshot.
        destination: a folder that does not exist yet.
        progress: called with the current action, the amount done, and the total amount (None if unknown).
        warn: called with lines for the user.
        credentials: GIT_SYNC_USERNAME and GIT_SYNC_PASSWORD for git.

    Returns:
        The record of the copy: mode, source without credentials, for git ref and commit, files, bytes.

    Raises:
        UserError: it cannot be copied; nothing is left at `destination`.
    """
    check(code)
    folder = Path(os.path.abspath(folder))
    with _building(destination) as building:
        if code.mode == "git":
            fetched = git.fetch(code.source or "", folder, building, progress, credentials)
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
            building, marker = _begin(destination, undo)
            yield building
            if marker is not None:
                _write_mark(marker, building)  # a folder keeps its inode when it is renamed
            if os.path.lexists(destination):  # a rename would replace an empty folder
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            os.rename(building, destination)
        except OSError as error:
            raise UserError(
                f"cannot write the job's code to {printable(destination)}: {error.strerror}; "
                "check that there is space and that you may write there, or choose another working dir"
            ) from None
        undo.pop_all()
    _remove_hidden(building.parent)
    if marker is not None:
        os.close(marker)


def _begin(destination: Path, undo: contextlib.ExitStack) -> tuple[Path, int | None]:
    """Make an empty folder beside the destination in which to build it, and lock the destination's marker.

    Returns:
        The folder, and a descriptor of the marker; None if a job has claimed the destination already. `undo` removes
        everything that was created.

    Raises:
        OSError: it cannot be made.
        UserError: another client is copying code there now, or something else is there.
    """
    parent = destination.parent
    missing = [p for p in (parent, *parent.parents) if not p.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        undo.callback(_remove_if_empty, path)
    if missing:  # only paceline uses it: git can ignore it
        with contextlib.suppress(FileExistsError):  # another client has just created it
            undo.callback(_remove_if_alone, write_gitignore(parent))
    for left in parent.glob(".*.paceline.????????"):
        if _is_abandoned(left):  # by a client that was killed
            _remove_hidden(left)
    marker = None if marker_of(destination).is_dir() else _claim(destination, undo)
    hidden = parent / building_name(destination.name, secrets.token_hex(4))
    undo.callback(_remove_hidden, hidden)
    hidden.mkdir(mode=0o700)
    (hidden / _HIDDEN_MARKER).write_bytes(_MARK)
    building = hidden / "code"
    building.mkdir(mode=0o700)
    return building, marker


def _claim(destination: Path, undo: contextlib.ExitStack) -> int:
    """A descriptor of the destination's marker, locked while it is open, so that no other client copies code there.

    Raises:
        OSError: it cannot be made.
        UserError: another client holds that lock, or the file is not paceline's.
    """
    marker = marker_of(destination)
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.ExitStack() as own:
        try:
            fd, is_new = os.open(marker, flags | os.O_CREAT | os.O_EXCL, 0o600), True
        except FileExistsError:
            fd, is_new = os.open(marker, flags), False
        own.callback(os.close, fd)
        if not is_new and not _is_mark(os.pread(fd, _MOST, 0)):
            raise UserError(f"{printable(marker)} is there already; choose another job name")
        if not _lock(fd) or os.path.lexists(destination) or not _is_at(fd, marker):
            raise UserError(f"another client is copying code to {printable(destination)}; choose another job name")
        own.pop_all()
    undo.callback(os.close, fd)
    undo.callback(marker.unlink, missing_ok=True)
    os.ftruncate(fd, 0)
    os.pwrite(fd, _MARK, 0)
    return fd


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # a file system without locks
    return True


def _is_at(fd: int, path: Path) -> bool:
    """Whether a path still refers to an open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _write_mark(fd: int, folder: Path) -> None:
    mark = _mark_of(os.lstat(folder))
    os.ftruncate(fd, 0)
    os.pwrite(fd, mark, 0)


def _mark_of(status: os.stat_result) -> bytes:
    """The content of the marker of a folder."""
    return _MARK + f"inode {status.st_ino}\n".encode()


def _is_mark(mark: bytes) -> bool:
    return re.fullmatch(re.escape(_MARK) + rb"(inode \d+\n)?", mark) is not None


def _is_abandoned(hidden: Path) -> bool:
    """Whether a client made this folder to build code in, and was killed."""
    try:
        is_old = time.time() - hidden.lstat().st_mtime > _ABANDONED
        return is_old and not hidden.is_symlink() and (hidden / _HIDDEN_MARKER).read_bytes() == _MARK
    except OSError:
        return False


def _remove_hidden(hidden: Path) -> None:
    """Remove a folder in which code was built; its marker last."""
    with contextlib.suppress(OSError):
        shutil.rmtree(hidden / "code", ignore_errors=True)
        if os.listdir(hidden) == [_HIDDEN_MARKER]:
            (hidden / _HIDDEN_MARKER).unlink()
        hidden.rmdir()


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _remove_if_alone(file: Path) -> None:
    """Remove a file, unless another job uses its folder by now."""
    with contextlib.suppress(OSError):
        if os.listdir(file.parent) == [file.name]:
            file.unlink()
