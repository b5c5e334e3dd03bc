"""What Slurm says of this user's jobs, asked at most once in ten seconds by all of the user's clients together.

Many clusters forbid frequent polling. So the answer is kept in a file in paceline's root, with its time; whoever finds
it too old asks again, and the others meanwhile use what is there. Each cluster has a file of its own, see `cluster.py`.
All times are those of the disk with the root, since the clocks of machines may differ.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.node.errors import Refused
from paceline.node.files import read_json, write_json

from . import cluster, reasons
from .commands import table
from .folder import COMMENT
from .jobs import disk_time

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from .folder import Identity

FRESH = 10.0  # seconds for which an answer is used
_LATE = 3.0  # seconds that Slurm may take to list a job that it has taken
_BACK_OFF = 60.0  # at most so many seconds between two calls while Slurm does not answer
_QUICK = 12.0  # seconds that Slurm may take to answer one who only looks
_LOOK = 0.1  # seconds between two looks whether another process has the answer
REFUSED = "refused: "  # begins what a batch script puts into the comment that cannot begin
_OURS = re.compile(re.escape(COMMENT) + r"(\w+)")  # a site may put words of its own beside it
_FIELDS = {
    "JobID": 24, "ArrayJobID": 24, "ArrayTaskID": 24, "State": 24, "Reason": 80, "StartTime": 24, "RestartCnt": 12,
    "Partition": 64, "Name": 128, "WorkDir": 1024, "Comment": 1024, "NumNodes": 12,
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
        job_id: paceline's identifier; "" if its comment has none.
        task: its number as a task of an array, such as 12_3; "" if it is none.
        name: of the job.
        folder: where it works.
        said: what follows the identifier in its comment, see `mirror.absorb`.
        nodes: how many it has, or asks for.
    """

    id: str
    state: str
    reason: str
    start: float | None
    restarts: int
    partition: str
    job_id: str
    task: str = ""
    name: str = ""
    folder: str = ""
    said: str = ""
    nodes: int = 1

    @property
    def number(self) -> str:
        """By which Slurm's commands take it, and no other task of its array."""
        return self.task or self.id

    def is_of(self, identity: Identity) -> bool:
        """Whether it belongs to this job of paceline. The site may have changed the comment."""
        if self.job_id:
            return self.job_id == identity.job_id
        return (self.name, self.folder) == (identity.name, identity.folder)

    @property
    def is_pending(self) -> bool:
        """Whether it waits; so it does in a state that a newer Slurm may have."""
        return not self.is_running and not self.is_over

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

    def __init__(self, root: Path, fresh: float = FRESH, seconds: float = _QUICK) -> None:
        """Ask nothing yet.

        Args:
            root: paceline's.
            fresh: seconds for which an answer is used.
            seconds: that Slurm may take.
        """
        self._root, self._fresh, self._seconds = root, fresh, seconds
        self._found: dict[str, Entry] | None = None
        self._time = 0.0
        self._cluster: str | None = None
        self._until: float | None = None
        self.problem: Refused | None = None

    def entry(self, number: str, identity: Identity | None) -> Entry | None:
        """The Slurm job with this number; None if Slurm does not know it, or it is not of this identity."""
        found = self._all().get(number)
        return found if found is None or identity is None or found.is_of(identity) else None

    def of(self, identity: Identity) -> list[Entry]:
        """The Slurm jobs of a job of paceline; those that have ended only if their comment says so."""
        those = [entry for entry in self._all().values() if entry.is_of(identity)]
        return [entry for entry in those if entry.job_id or not entry.is_over]

    def knows_since(self, moment: float) -> bool:
        """Whether the answer is new enough to have a Slurm job that was made at this time of the disk."""
        self._all()
        return self._time > moment + _LATE

    def is_past(self, moment: float, seconds: float) -> bool:
        """Whether a time of the disk is longer ago than this."""
        return disk_time(self._root) > moment + seconds

    def elsewhere(self, job: Mapping[str, object]) -> str:
        """Why Slurm is not asked for a job here: it is of another cluster; "" if it is of this one."""
        theirs = job.get("cluster")
        self._all()
        if not theirs or not self._cluster or theirs == self._cluster:
            return ""
        return f"it is in the Slurm cluster {theirs}, and this machine belongs to {self._cluster}"

    def left(self, seconds: float) -> float:
        """How much is left of the seconds for which this look at jobs, of which there may be many, waits for others."""
        if self._until is None:
            self._until = time.monotonic() + seconds
        return max(0.0, self._until - time.monotonic())

    def forget(self) -> None:
        """Let the next look of any client ask Slurm: the answer that is kept was true before this client's command."""
        with contextlib.suppress(OSError):
            _file(self._root, self._cluster).unlink()

    def _all(self) -> dict[str, Entry]:
        if self._found is None:
            self._found = self._read()
        return self._found

    def _read(self) -> dict[str, Entry]:
        self._cluster = cluster.known(self._root)
        file = _file(self._root, self._cluster)
        kept = read_json(file)
        now = disk_time(self._root)
        if not _is_fresh(kept, now, self._fresh):
            with _only_one(file, self._seconds):
                kept, now = read_json(file), disk_time(self._root)
                if not _is_fresh(kept, now, self._fresh):
                    kept = self._ask(kept, now)
        kept = kept or {}
        if kept.get("problem"):
            self.problem = Refused(str(kept["problem"]))
        with contextlib.suppress(TypeError, ValueError, KeyError):  # a damaged file: it is written anew later
            self._time = float(kept["time"])
            entries = [Entry(*entry) for entry in kept["entries"]]
            return {entry.number: entry for entry in entries}
        return {}

    def _ask(self, before: dict[str, object] | None, begun: float) -> dict[str, object]:
        until = time.monotonic() + self._seconds
        try:
            self._cluster = cluster.asked(self._root, self._seconds)
            entries = _listed(max(1.0, until - time.monotonic()))
            answer: dict[str, object] = {"time": begun, "asked": begun, "entries": entries}
        except Refused as error:
            failures = int(str((before or {}).get("failures", 0))) + 1
            answer = {"time": 0.0, "entries": [], **(before or {}), "failures": failures, "problem": str(error)}
            answer["asked"] = disk_time(self._root)  # now: the next one does not wait as long at once
        with contextlib.suppress(OSError):
            write_json(_file(self._root, self._cluster), answer)
        return answer


def told_in(said: str) -> dict[str, Any]:
    """What the batch script of a job has put into the comment at its end; the site may put words behind it.

    Raises:
        ValueError: it is something else.
    """
    found = json.JSONDecoder().raw_decode(said)[0]
    if not isinstance(found, dict):
        raise ValueError(f"not an object: {said}")
    return found


class NothingAsked(Queue):
    """Stands for Slurm's answer where there is none yet: the job was submitted just now."""

    def _read(self) -> dict[str, Entry]:
        return {}


def _file(root: Path, name: str | None) -> Path:
    """The file with the answer of a cluster."""
    return root / (f"squeue-{name}.json" if name else "squeue.json")


def _is_fresh(kept: dict[str, object] | None, now: float, fresh: float) -> bool:
    try:
        assert kept is not None
        failures = int(str(kept.get("failures", 0)))
        age = now - float(str(kept["asked"]))
        return bool(0 <= age < min(_BACK_OFF, fresh * 2 ** min(failures, 6)))
    except (AssertionError, KeyError, ValueError):
        return False


@contextlib.contextmanager
def _only_one(file: Path, seconds: float) -> Iterator[None]:
    """Let one process ask; others that come meanwhile wait for its answer, as far as locks work there."""
    until = time.monotonic() + seconds
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        while time.monotonic() < until:  # the other one may hang
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOOK)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(fd)


def _listed(seconds: float) -> list[Entry]:
    who = f"--user={os.getuid()}"
    rows = table("squeue", "--array", "--states=all", who, columns=_FIELDS, seconds=seconds)
    return [_entry(row) for row in rows]


def _entry(column: Mapping[str, str]) -> Entry:
    """A row of squeue."""
    start = column["StartTime"]
    restarts = column["RestartCnt"]
    comment = _OURS.search(column["Comment"])
    is_whole = comment is not None and comment.end() < _FIELDS["Comment"]  # else it may go on
    nodes = re.match(r"\d+", column["NumNodes"])
    return Entry(
        column["JobID"],
        column["State"],
        column["Reason"],
        float(start) if start.isdecimal() else None,
        int(restarts) if restarts.isdecimal() else 0,
        column["Partition"],
        comment[1] if comment is not None and is_whole else "",
        f"{column['ArrayJobID']}_{column['ArrayTaskID']}" if column["ArrayTaskID"].isdecimal() else "",
        column["Name"],
        column["WorkDir"],
        column["Comment"][comment.end() :].strip() if comment is not None else "",
        int(nodes[0]) if nodes is not None else 1,
    )
