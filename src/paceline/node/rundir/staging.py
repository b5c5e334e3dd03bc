"""Run directories that are being made, are reused, or were left incomplete."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .directory import MARKER, RunDirectory

if TYPE_CHECKING:
    from types import TracebackType


SPARE = 64 * 1024  # bytes


# The name of a run directory while it is made, and while it is removed.
_HIDDEN = re.compile(r"\.[A-Za-z0-9][A-Za-z0-9._-]*\.(\d+|deleted)\.\d+")
_ABANDONED = 60.0  # seconds after which a folder without a held lock has been left by a killed client


class Staging:
    """A run directory that is being made. It becomes a job by `settle`, and is removed on failure.

    Attributes:
        directory: the folder to fill, with mode 0700.
        lock: descriptor that holds its lock, for the agent to inherit.
    """

    def __init__(self, path: Path, jobs: Path | None = None) -> None:
        """Make the folder beside `path`."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
        self._note = note_of(hidden, jobs)
        hidden.mkdir(mode=0o700)
        self.directory = RunDirectory(hidden)
        self.lock = -1
        try:
            self._fill()
        except BaseException:
            self._take_back()
            raise

    def _fill(self) -> None:
        self.directory.mark()
        self.lock = os.open(self.directory.lock, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.directory.journal.touch()
        self.directory.spare.write_bytes(bytes(SPARE))

    def _take_back(self) -> None:
        import shutil  # not needed by those that only read records

        if self.lock >= 0:
            os.close(self.lock)
        if not self.is_settled:
            shutil.rmtree(self.directory.path, ignore_errors=True)  # this process has made it
        drop_note(self._note)

    def __enter__(self) -> Staging:
        return self

    @property
    def is_settled(self) -> bool:
        """Whether it is a job now."""
        return self.directory.path == self._path

    def settle(self) -> RunDirectory:
        """Give the folder its name. If two processes do so at the same time, one succeeds."""
        if os.path.lexists(self._path):  # a rename would replace an empty folder
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self._path))
        try:
            os.rename(self.directory.path, self._path)
        except OSError as error:
            if os.path.lexists(self._path):
                raise FileExistsError(error.errno, error.strerror, str(self._path)) from None
            raise
        self.directory = RunDirectory(self._path)
        return self.directory

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._take_back()


class Reopened:
    """The run directory of a job that starts again.

    Attributes:
        lock: descriptor that holds its lock, for the agent to inherit.
    """

    def __init__(self, path: Path) -> None:
        """Take its lock."""
        self.directory = RunDirectory(path)
        self.lock = os.open(self.directory.lock, os.O_RDWR)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.lock)
            raise

    def __enter__(self) -> Reopened:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.lock)


def sweep(jobs: Path) -> list[os.DirEntry[str]]:
    """The entries of paceline's folder of run directories. Removes what killed clients have left there."""
    try:
        entries = list(os.scandir(jobs))
    except FileNotFoundError:
        return []
    living = []
    for entry in entries:  # a link to nothing is a job that is being made, unless it was abandoned
        if entry.name.startswith("."):
            if _HIDDEN.fullmatch(entry.name) and _is_abandoned(Path(entry.path)):
                _remove_leftover(entry)
        elif not entry.is_symlink() or os.path.exists(entry.path) or _is_abandoned(Path(entry.path)):
            living.append(entry)
    return living


def _is_abandoned(path: Path) -> bool:
    """Whether a client was killed while it made or removed this job."""
    try:
        age = time.time() - path.lstat().st_mtime
    except OSError:
        return False
    return age > _ABANDONED and not RunDirectory(path).is_held


def note_of(hidden: Path, jobs: Path | None) -> Path | None:
    """Make a link to a hidden run directory in a user's folder, so that it is found if its client is killed."""
    if jobs is None or hidden.parent.resolve() == jobs.resolve():
        return None
    note = jobs / hidden.name
    try:
        jobs.mkdir(parents=True, exist_ok=True)
        note.symlink_to(hidden)
    except OSError:
        return None
    return note


def drop_note(note: Path | None) -> None:
    """Remove the note that `note_of` made."""
    if note is not None:
        with contextlib.suppress(OSError):
            note.unlink()


def _remove_leftover(entry: os.DirEntry[str]) -> None:
    """Remove a hidden run directory that paceline made; and one elsewhere with the note of it."""
    with contextlib.suppress(OSError):
        hidden = Path(os.readlink(entry.path)) if entry.is_symlink() else Path(entry.path)
        if hidden.name != entry.name:
            return
        if os.path.lexists(hidden) and not remove_folder(hidden):
            hidden.rmdir()  # works if its maker was killed before anything was in it
        if entry.is_symlink():
            os.unlink(entry.path)


def remove_folder(folder: Path) -> bool:
    """Remove a run directory if paceline made it; returns whether it is gone.

    The marker that paceline made it is removed last, so that an interrupted removal can be completed.
    """
    import shutil  # not needed by those that only read records

    if not RunDirectory(folder).is_ours:
        return False
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != MARKER:
                os.unlink(entry.path)
        if os.listdir(folder) == [MARKER]:
            os.unlink(folder / MARKER)
            folder.rmdir()
    return not os.path.lexists(folder)
