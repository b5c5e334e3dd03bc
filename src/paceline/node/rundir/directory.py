"""The folder in which a node keeps its part of a job.

```
job.json                       what the user asked for, as the client stored it
spec.json                      what the agent gets to do
lock                           held by the process that works on the job: the client that submits it, then its agent
.paceline-run                  marks a folder that paceline made; a folder without it is never removed
status.json                    the current state, replaced atomically
events.jsonl                   what happened, one JSON object per line
spare                          space for the last status and event on a full disk
agent.log                      what the agent and the fork server themselves print
logs/<attempt>/rank-<r>.log    what rank r wrote (and rank-<r>.err.log where stderr is kept apart)
logs/<attempt>/times           which of these files had which size when
errors/<attempt>/rank-<r>.json the exception that ended rank r
```
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from .status import Status

_MARKER = ".paceline-run"
_MARK = b"A run directory, made by paceline. `paceline delete` removes it only while this file is here.\n"
# What a run directory is called while it is made, and while it is removed.
HIDDEN = re.compile(r"\.[A-Za-z0-9][A-Za-z0-9._-]*\.(\d+|deleted)\.\d+")


class RunDirectory:
    """Paths and atomic writes of one run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.job = path / "job.json"
        self.spec = path / "spec.json"
        self.lock = path / "lock"
        self.status = path / "status.json"
        self.events = path / "events.jsonl"
        self.spare = path / "spare"
        self.agent_log = path / "agent.log"

    def log(self, attempt: int, rank: int, stream: str = "out") -> Path:
        """The log file of a rank; `stream` "err" names the one that holds stderr where it is kept apart."""
        return self.path / "logs" / str(attempt) / (f"rank-{rank}.log" if stream == "out" else f"rank-{rank}.err.log")

    def times(self, attempt: int) -> Path:
        """The time index of an attempt's logs."""
        return self.path / "logs" / str(attempt) / "times"

    def error(self, attempt: int, rank: int) -> Path:
        """The error record of a rank."""
        return self.path / "errors" / str(attempt) / f"rank-{rank}.json"

    def prepare_attempt(self, attempt: int) -> None:
        """Make the folders that the ranks of an attempt write to."""
        self.log(attempt, 0).parent.mkdir(parents=True, exist_ok=True)
        self.error(attempt, 0).parent.mkdir(parents=True, exist_ok=True)

    def write_status(self, status: Status) -> None:
        """Replace status.json in one step: a reader sees all of the old or of the new one. A full disk is no error."""
        try:
            write_json(self.status, status)
        except OSError:
            with contextlib.suppress(OSError):
                self.spare.unlink()
                write_json(self.status, status)

    def read_status(self) -> Status | None:
        """The last status, or None before the agent has written one."""
        return cast("Status | None", read_json(self.status))

    def append_event(self, event: str, **details: Any) -> None:
        """Append a line to events.jsonl, in one piece even if other processes append. A full disk is no error."""
        line = json.dumps({"time": time.time(), "event": event, **details}) + "\n"
        fd = os.open(self.events, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            try:
                os.write(fd, line.encode())
            except OSError:
                with contextlib.suppress(OSError):
                    self.spare.unlink()
                    os.write(fd, line.encode())
        finally:
            os.close(fd)

    def mark(self) -> None:
        """Mark this folder as made by paceline.

        Raises:
            OSError: it cannot be written.
        """
        (self.path / _MARKER).write_bytes(_MARK)

    @property
    def is_ours(self) -> bool:
        """Whether paceline made this folder; a link to one is not one."""
        try:
            return not self.path.is_symlink() and (self.path / _MARKER).read_bytes() == _MARK
        except OSError:
            return False

    # -- the lock ------------------------------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Whether a client or an agent works on the job; the kernel frees the lock of a killed one."""
        try:
            fd = os.open(self.lock, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def wait_until_free(self) -> None:
        """Return when no client and no agent works on the job any more."""
        try:
            fd = os.open(self.lock, os.O_RDONLY)
        except OSError:
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
        finally:
            os.close(fd)


def note_of(hidden: Path, jobs: Path | None) -> Path | None:
    """Record a hidden run directory in a user's folder, where leftovers of killed clients are not searched for.

    Args:
        hidden: the run directory, there or about to be.
        jobs: the folder of run directories; None where `hidden` lies in it.

    Returns:
        The link that remembers it, for `drop_note`; None where none is needed, or `jobs` cannot be written to.
    """
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
    """Remove the record that `note_of` made."""
    if note is not None:
        with contextlib.suppress(OSError):
            note.unlink()


def remove_leftover(entry: os.DirEntry[str]) -> None:
    """Remove a hidden run directory that paceline made; and one elsewhere with the note of it."""
    with contextlib.suppress(OSError):
        hidden = Path(os.readlink(entry.path)) if entry.is_symlink() else Path(entry.path)
        if hidden.name != entry.name:
            return
        if os.path.lexists(hidden) and not remove_folder(hidden):
            hidden.rmdir()  # empty if its maker was killed at once; else this fails
        if entry.is_symlink():
            os.unlink(entry.path)


def remove_folder(folder: Path) -> bool:
    """Remove a run directory, unless paceline did not make it; returns whether it is gone.

    The marker is removed last, so that an interrupted removal can be finished.
    """
    import shutil  # not needed by those that only read records

    if not RunDirectory(folder).is_ours:
        return False
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != _MARKER:
                os.unlink(entry.path)
        if os.listdir(folder) == [_MARKER]:
            os.unlink(folder / _MARKER)
            folder.rmdir()
    return not os.path.lexists(folder)


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(value))
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`, or None if there is none that can be read."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
