"""What Slurm says of this user's jobs, asked at most once in ten seconds by all of the user's clients together.

Many clusters forbid frequent polling. So the answer is kept in a file in paceline's root, with its time; whoever finds
it too old asks again, and the others meanwhile use what is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING, NamedTuple

from paceline.node.errors import Refused
from paceline.node.files import read_json, write_json

from . import reasons
from .commands import table
from .folder import COMMENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

FRESH = 10.0  # seconds for which an answer is used
_LATE = 3.0  # seconds that Slurm may take to list a job that it has taken
_BACK_OFF = 60.0  # at most so many seconds between two calls while Slurm does not answer
_FIELDS = {
    "JobID": 24, "ArrayJobID": 24, "ArrayTaskID": 24, "State": 24, "Reason": 80, "StartTime": 24, "RestartCnt": 12,
    "Partition": 64, "NumNodes": 12, "TimeLeft": 24, "Comment": 128,
}  # fmt: skip


class Entry(NamedTuple):
    """A Slurm job.

    Attributes:
        id: its number.
        state: Slurm's word for it.
        reason: why it waits, or has ended, in Slurm's word.
        start: its start, or Slurm's estimate of it; seconds since the epoch.
        restarts: how often it has been requeued.
        partition: where it is.
        job_id: paceline's identifier; "" if it is not a job of paceline.
        task: its number as a task of an array, such as 12_3; "" if it is none.
    """

    id: str
    state: str
    reason: str
    start: float | None
    restarts: int
    partition: str
    job_id: str
    task: str = ""

    @property
    def is_pending(self) -> bool:
        """Whether it waits."""
        return self.state in (*reasons.PENDING, "CONFIGURING")

    @property
    def is_running(self) -> bool:
        """Whether it has nodes; a process of it may run."""
        return self.state in reasons.RUNNING

    @property
    def is_over(self) -> bool:
        """Whether it has ended for good."""
        return self.state in reasons.ENDED


class Queue:
    """Slurm's answer, asked for when it is first needed.

    Attributes:
        problem: why Slurm has not answered now; None if it has, or was not asked.
    """

    def __init__(self, root: Path, fresh: float = FRESH) -> None:
        self._file, self._fresh = root / "squeue.json", fresh
        self._found: dict[str, Entry] | None = None
        self._time = 0.0
        self.problem: Refused | None = None

    def entry(self, number: str) -> Entry | None:
        """The Slurm job with this number; None if Slurm does not know it."""
        return self._all().get(number)

    def of(self, job_id: str) -> list[Entry]:
        """The Slurm jobs of a job of paceline."""
        return [entry for entry in self._all().values() if entry.job_id == job_id]

    def knows_since(self, moment: float) -> bool:
        """Whether the answer is new enough to have a Slurm job that was made at this time."""
        self._all()
        return self._time > moment + _LATE

    def _all(self) -> dict[str, Entry]:
        if self._found is None:
            self._found = self._read()
        return self._found

    def _read(self) -> dict[str, Entry]:
        kept = read_json(self._file)
        if not _is_fresh(kept, self._fresh):
            with _only_one(self._file):
                kept = read_json(self._file)
                if not _is_fresh(kept, self._fresh):
                    kept = self._ask(kept)
        kept = kept or {}
        if kept.get("problem"):
            self.problem = Refused(str(kept["problem"]))
        with contextlib.suppress(TypeError, ValueError, KeyError):  # a damaged file: it is written anew later
            self._time = float(kept["time"])
            entries = [Entry(*entry) for entry in kept["entries"]]
            return {entry.task or entry.id: entry for entry in entries}
        return {}

    def _ask(self, before: dict[str, object] | None) -> dict[str, object]:
        begun = time.time()
        try:
            answer: dict[str, object] = {"time": begun, "asked": begun, "entries": _listed()}
        except Refused as error:
            failures = int(str((before or {}).get("failures", 0))) + 1
            answer = {"time": 0.0, "entries": [], **(before or {}), "asked": begun, "failures": failures}
            answer["problem"] = str(error)
        with contextlib.suppress(OSError):
            write_json(self._file, answer)
        return answer


def _is_fresh(kept: dict[str, object] | None, fresh: float) -> bool:
    try:
        assert kept is not None
        failures = int(str(kept.get("failures", 0)))
        age = time.time() - float(str(kept["asked"]))
        return bool(0 <= age < min(_BACK_OFF, fresh * 2 ** min(failures, 6)))
    except (AssertionError, KeyError, ValueError):
        return False


@contextlib.contextmanager
def _only_one(file: Path) -> Iterator[None]:
    """Let one process ask; others that come meanwhile wait for its answer, as far as locks work there."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _listed() -> list[Entry]:
    rows = table("squeue", "--array", "--states=all", f"--user={os.getuid()}", columns=_FIELDS)
    return [_entry(row) for row in rows]


def _entry(column: Mapping[str, str]) -> Entry:
    """A row of squeue."""
    start = column["StartTime"]
    restarts = column["RestartCnt"]
    comment = column["Comment"]
    return Entry(
        column["JobID"],
        column["State"],
        column["Reason"],
        float(start) if start.isdecimal() else None,
        int(restarts) if restarts.isdecimal() else 0,
        column["Partition"],
        comment[len(COMMENT) :].strip() if comment.startswith(COMMENT) else "",
        f"{column['ArrayJobID']}_{column['ArrayTaskID']}" if column["ArrayTaskID"].isdecimal() else "",
    )
