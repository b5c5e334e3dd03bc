"""The folder in which a node keeps its part of a job.

```
job.json                       what the user asked for, as the client stored it
spec.json                      what the agent gets to do
lock                           held by the process that works on the job: the client that submits it, then its agent
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
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from .status import Status


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
