"""What Slurm says of this user's jobs, asked at most once in ten seconds by all of the user's clients together.

Many clusters forbid frequent polling. So the answer is kept in a file in paceline's root, with its time; whoever finds
it too old asks again, and the others meanwhile use what is there. Each cluster has a file of its own, see `cluster.py`.
A file of another version is not used: Slurm is asked again. All times are those of the disk with the root, since the
clocks of machines may differ.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from typing import TYPE_CHECKING, NamedTuple

from paceline.node.errors import Refused
from paceline.node.files import read_json, write_json
from paceline.node.host.slurm import cluster
from paceline.node.host.slurm.call import NoSuchJob, table
from paceline.node.host.slurm.job_folder import COMMENT
from paceline.node.host.slurm.job_folders import disk_time

from . import reasons

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from paceline.node.host.slurm.job_folder import Identity

FRESH = 10.0  # seconds for which an answer is used
_LATE = 3.0  # seconds that Slurm may take to list a job that it has taken
_MOST_LOST = 1000  # jobs that Slurm has lost are remembered
_ALL = ("--array", "--states=all")
_BACK_OFF = 60.0  # at most so many seconds between two calls while Slurm does not answer
QUICK = 12.0  # seconds that Slurm may take to answer one who only looks
_LEAST = 1.0  # seconds that a command may take at least
_LOOK = 0.1  # seconds between two looks whether another process has the answer
_OURS = re.compile(re.escape(COMMENT) + r"(\w+)")  # a site may put words of its own beside it
_VERSION = 3  # of the file
_FIELDS = {
    "JobID": 24, "ArrayJobID": 24, "ArrayTaskID": 24, "State": 24, "Reason": 80, "StartTime": 24, "EndTime": 24,
    "RestartCnt": 12, "Partition": 64, "Name": 128, "WorkDir": 1024, "Comment": 1024, "BatchHost": 64,
}  # fmt: skip


class Entry(NamedTuple):
    """A Slurm job.

    Attributes:
        id: its number.
        state: Slurm's word for it.
        reason: why it waits, or has ended, in Slurm's word.
        start: its start, or Slurm's estimate of it; seconds since the epoch.
        end: its end, or that of its time limit.
        restarts: how often it has been requeued.
        partition: where it is.
        job_id: paceline's identifier; "" if its comment has none.
        task: its number as a task of an array, such as 12_3; "" if it is none.
        folder: where it works.
        host: its first node, where its batch script runs; "" before it has one.
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
    host: str = ""
    end: float | None = None

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

    def __init__(self, root: Path, fresh: float = FRESH, seconds: float = QUICK) -> None:
        """Ask nothing yet."""
        self._root, self._fresh, self._until = root, fresh, time.monotonic() + seconds
        self._found: dict[str, Entry] | None = None
        self._answer = _Answer(0.0, 0.0, [])
        self._cluster: str | None = None
        self.problem: Refused | None = None

    @property
    def remaining(self) -> float:
        """Seconds that Slurm may still take."""
        return max(_LEAST, self._until - time.monotonic())

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
        return self._answer.time > moment + _LATE

    def has_lost(self, identity: Identity, number: str | None, since: float, *, is_shared: bool = False) -> bool:
        """Whether Slurm has no such job: it does not list it, and says so, later than this, when asked for it alone.

        A list of a user's jobs proves nothing: what makes it may not know the user. Without an answer it is False.
        """
        if not self.knows_since(since) or self.problem is not None:
            return False
        key = number or identity.job_id
        if key in self._answer.lost:
            return True
        alone = f"--name={identity.name}" if number is None else f"--jobs={number}"
        try:
            rows = table("squeue", *_ALL, alone, columns=_FIELDS, seconds=self.remaining)
        except NoSuchJob:
            rows = []
        except Refused as error:
            self._keep(self._answer.failed(error, disk_time(self._root)))
            return False
        if any(is_shared or _entry(row).is_of(identity) for row in rows):
            return False
        self._keep(self._answer._replace(lost=[*self._answer.lost, key]))
        return True

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
        kept = _Answer.read(file)
        now = disk_time(self._root)
        if kept is None or not kept.is_fresh(now, self._fresh):
            with _only_one(file, self._until):
                kept, now = _Answer.read(file), disk_time(self._root)
                if kept is None or not kept.is_fresh(now, self._fresh):
                    kept = self._ask(kept, now)
        self._use(kept)
        return {entry.number: entry for entry in kept.entries}

    def _use(self, answer: _Answer) -> None:
        self._answer = answer
        self.problem = Refused(answer.problem) if answer.problem else None

    def _keep(self, answer: _Answer) -> None:
        """Use an answer, and let all clients use it."""
        self._use(answer)
        with contextlib.suppress(OSError):
            answer.write(_file(self._root, self._cluster))

    def _ask(self, before: _Answer | None, begun: float) -> _Answer:
        try:
            self._cluster = cluster.asked(self._root, self.remaining)
            entries = _listed(self.remaining)
            answer = _Answer(begun, begun, entries, lost=before.lost[-_MOST_LOST:] if before is not None else ())
        except Refused as error:  # now: the next one does not wait as long at once
            answer = (before or _Answer(0.0, 0.0, [])).failed(error, disk_time(self._root))
        with contextlib.suppress(OSError):
            answer.write(_file(self._root, self._cluster))
        return answer


class _Answer(NamedTuple):
    """An answer of Slurm, as it is kept.

    Attributes:
        time: when Slurm was asked that has answered; 0 if it never has.
        asked: when it was asked last.
        failures: how often it has not answered since.
        problem: why; "" if it has answered.
        lost: numbers of jobs of which it has said that it does not know them.
    """

    time: float
    asked: float
    entries: list[Entry]
    failures: int = 0
    problem: str = ""
    lost: Sequence[str] = ()

    @classmethod
    def read(cls, file: Path) -> _Answer | None:
        """What is kept in a file; None if there is none, or it is damaged or of another version."""
        kept = read_json(file) or {}
        with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):
            if kept["v"] == _VERSION:
                entries = [Entry(**entry) for entry in kept["entries"]]
                numbers = float(kept["time"]), float(kept["asked"]), entries, int(kept["failures"])
                return cls(*numbers, str(kept["problem"]), list(map(str, kept["lost"])))
        return None

    def failed(self, error: Refused, now: float) -> _Answer:
        """This answer, after Slurm has not given a newer one."""
        return self._replace(asked=now, failures=self.failures + 1, problem=str(error))

    def write(self, file: Path) -> None:
        """Keep it."""
        write_json(file, {"v": _VERSION, **self._asdict(), "entries": [entry._asdict() for entry in self.entries]})

    def is_fresh(self, now: float, fresh: float) -> bool:
        """Whether it may be used at this time; an answer that did not come counts for longer."""
        return 0 <= now - self.asked < min(_BACK_OFF, fresh * float(2 ** min(self.failures, 6)))


class NothingAsked(Queue):
    """Stands for Slurm's answer where there is none yet: the job was submitted just now."""

    def _read(self) -> dict[str, Entry]:
        return {}


def _file(root: Path, name: str | None) -> Path:
    """The file with the answer of a cluster."""
    return root / (f"queue-{name}.json" if name else "queue.json")


@contextlib.contextmanager
def _only_one(file: Path, until: float) -> Iterator[None]:
    """Let one process ask; others that come meanwhile wait for its answer, as far as locks work there."""
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
    rows = table("squeue", *_ALL, who, columns=_FIELDS, seconds=seconds)
    return [_entry(row) for row in rows]


def _entry(column: Mapping[str, str]) -> Entry:
    """A row of squeue."""
    start, end = column["StartTime"], column["EndTime"]
    restarts = column["RestartCnt"]
    comment = _OURS.search(column["Comment"])
    is_whole = comment is not None and comment.end() < _FIELDS["Comment"]  # else it may go on
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
        column["BatchHost"],
        float(end) if end.isdecimal() else None,
    )
