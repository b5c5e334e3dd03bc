"""The folder in which a node keeps its part of a job.

```
job.json                       what the user asked for, as the client stored it
spec.json                      this node's part of the job, for the agent
lock                           held by the process that works on the job: the client that submits it, then its agent
.paceline-run                  marks a folder that paceline made; a folder without it is never removed
journal.jsonl                  what happens, one JSON object per line; see `node/journal`
status.json                    a cache of the state that follows from it, replaced atomically
client.sock                    while a client elsewhere follows a job in the foreground: there it connects again
spare                          space for the last record and status on a full disk
telemetry.jsonl                what the job uses on this node over time; see `node/telemetry`
origin.json                    what it runs with: versions, the commit of its code, and the changes since
agent.log                      what the agent and the fork server themselves print
logs/<attempt>/rank-<r>.log    output of rank r (stderr in rank-<r>.err.log if it has a file of its own)
logs/<attempt>/times           the sizes of these files over time
errors/<attempt>/rank-<r>.json the exception that ended rank r
saved.json                     the step that the library has saved last, in any folder
agreed.json                    the last attempt that the agent of a MIN:MAX job has agreed to
noticed                        made when it was seen first that the job has ended without a record of its end
users/<job id>                 another job that keeps its checkpoints here: this folder is not removed before that job
```
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

from paceline.contract import found
from paceline.node.files import read_json, write_json
from paceline.node.journal import records as journal
from paceline.node.journal.state import cached, load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.contract.records import ErrorRecord
    from paceline.node.journal.records import Record
    from paceline.node.journal.status import Agreement, Status

MARKER = ".paceline-run"
SAVED = "saved.json"
_MARK = b"A run directory, made by paceline. `paceline delete` removes it only while this file is here.\n"

_KEPT_SECONDS = 1.0  # to wait for a lock; while a job runs its lock is held, and the job cannot be removed
_PAUSE = 0.02  # seconds between two tries to lock


class RunDirectory:
    """Paths and atomic writes of one run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.job = path / "job.json"
        self.spec = path / "spec.json"
        self.lock = path / "lock"
        self.journal = path / "journal.jsonl"
        self.status = path / "status.json"
        self.spare = path / "spare"
        self.agreed = path / "agreed.json"
        self.noticed = path / "noticed"
        self.client_socket = path / "client.sock"
        self.agent_log = path / "agent.log"
        self.telemetry = path / "telemetry.jsonl"
        self.origin = path / "origin.json"

    def log(self, attempt: int, rank: int, stream: str = "out") -> Path:
        """The log file of a rank; with `stream` "err", the separate file for stderr."""
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

    def append(self, *records: Record) -> tuple[list[Record], int]:
        """Append records to the journal, see `records.append`."""
        return journal.append(self.journal, self.spare, records)

    def write_status(self, status: Status, offset: int) -> None:
        """Replace status.json atomically; it holds the journal up to `offset`. A full disk is not an error."""
        content = cached(status, offset)
        try:
            write_json(self.status, content)
        except OSError:
            with contextlib.suppress(OSError):
                self.spare.unlink()
                write_json(self.status, content)

    def note_agreement(self, agent: str, attempt: int) -> None:
        """Note durably that an agent agrees to an attempt; there is no note if it cannot be written.

        After a loss of power the note proves that the agent has decided nothing later.
        """
        try:
            write_json(self.agreed, {"id": agent, "attempt": attempt}, durably=True)
        except OSError:
            self.forget_agreement()

    def forget_agreement(self) -> None:
        """Remove the note: the job has ended here, or the note is not true any more."""
        with contextlib.suppress(OSError):
            self.agreed.unlink()

    @property
    def agreement(self) -> Agreement | None:
        """What an agent has noted here; None if there is nothing."""
        noted = read_json(self.agreed) or {}
        is_one = isinstance(noted.get("id"), str) and type(noted.get("attempt")) is int
        return {"id": noted["id"], "attempt": noted["attempt"]} if is_one else None

    def load_status(self) -> Status:
        """The state of this part; {} before there is one."""
        return load(self.status, self.journal)

    def read_status(self) -> Status | None:
        """The state of this part; None before there is one that can be read."""
        try:
            return self.load_status() or None
        except (OSError, ValueError):
            return None

    def mark(self) -> None:
        """Mark this folder as made by paceline."""
        (self.path / MARKER).write_bytes(_MARK)

    @property
    def is_ours(self) -> bool:
        """Whether paceline made this folder; a link to one is not one."""
        try:
            return not self.path.is_symlink() and found.read_of_anyone(self.path / MARKER) == _MARK
        except (OSError, ValueError):
            return False

    def mark_used(self, user: Path, job_id: str) -> Path:
        """Note that another job keeps checkpoints in this folder; see `users`."""
        self._users.mkdir(exist_ok=True)
        mark = self._users / job_id
        write_json(mark, {"path": str(user), "job_id": job_id})
        return mark

    @property
    def users(self) -> list[Path]:
        """The run directories of existing jobs that keep checkpoints in this folder."""
        users = []
        with contextlib.suppress(OSError):
            for mark in sorted(self._users.iterdir()):
                noted = read_json(mark) or {}
                run = RunDirectory(Path(str(noted.get("path"))))
                if noted and (read_json(run.spec) or {}).get("job_id") == noted["job_id"]:
                    users.append(run.path)
        return users

    @property
    def _users(self) -> Path:
        return self.path / "users"

    # -- the lock ------------------------------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Whether a client or an agent works on the job; the kernel releases the lock of a killed process."""
        try:
            fd = os.open(self.lock, os.O_RDONLY | os.O_NONBLOCK)  # O_NONBLOCK in case the file is a FIFO
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Prevent the removal of the job within the block, for reading several of its files."""
        with self._locked(fcntl.LOCK_SH, _KEPT_SECONDS):
            yield

    @contextlib.contextmanager
    def owned(self, patience: float) -> Iterator[None]:
        """Lock the job within the block; BlockingIOError after `patience` seconds in which another process has it."""
        with self._locked(fcntl.LOCK_EX, patience) as is_locked:
            if not is_locked:
                raise BlockingIOError
            yield

    @contextlib.contextmanager
    def _locked(self, how: int, patience: float) -> Iterator[bool]:
        """Hold the lock; yields whether that worked. If the file is missing, no process works on the job."""
        try:
            fd = os.open(self.lock, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            self.path.lstat()
            yield True
            return
        try:
            deadline = time.monotonic() + patience
            while not (is_locked := _lock(fd, how)) and time.monotonic() < deadline:
                time.sleep(_PAUSE)  # processes that only check hold it for a moment
            if not os.path.samestat(os.fstat(fd), os.stat(self.lock)):
                raise FileNotFoundError(f"{self.path} was removed")
            yield is_locked
        finally:
            os.close(fd)

    def wait_until_free(self) -> None:
        """Wait until no client and no agent works on the job."""
        try:
            fd = os.open(self.lock, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
        finally:
            os.close(fd)


def job_around(folder: Path) -> RunDirectory | None:
    """The run directory that a folder is, or is in; those of other users do not count."""
    around = (RunDirectory(it) for it in (folder, *folder.parents))
    with contextlib.suppress(OSError):
        return next((run for run in around if found.read(run.path / MARKER) and run.is_ours), None)
    return None


def _lock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_error(path: Path) -> ErrorRecord | None:
    """The error record of a rank (`node/ranks/program.py` writes it); None if there is no valid one."""
    record = read_json(path)
    if record is None or not all(isinstance(record.get(key), str) for key in ("type", "message", "traceback")):
        return None
    offsets = [record.get(key) for key in ("log_start", "log_end")]
    is_located = all(offset is None or (type(offset) is int and offset >= 0) for offset in offsets)
    return cast("ErrorRecord", record) if is_located and isinstance(record.get("time"), float) else None
