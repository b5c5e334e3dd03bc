"""The folder of a Slurm job, on a disk that the login node and the nodes of the cluster share.

```
job.json                  the job, as its user asked for it, and its identifier
code/<name>               the copy of its code, if it has its own
batch.sh                  the script that sbatch got
ids                       the numbers of its Slurm jobs, one per line; --chain adds some
slurm.out                 what the batch scripts and srun printed
stop                      somebody has asked to stop it; the number of the signal, once that has been sent
suspended                 "hold" while it is being suspended, "held" once Slurm holds it; empty if it was resumed before
checkpoints               where the library saves, unless the job says
lives/<id>.<restarts>/    one time that Slurm started it
    followed              the start that has taken its place, whose agents alone may work; empty until then
    step                  the number of its step in Slurm
    <node rank>/<name>    the run directory of a node
    <node rank>/node      Slurm's name of the node
    <node rank>/refused   why the job cannot run on that node
    warned                what Slurm announced: that the time limit is near, or a preemption
    outcome.json          what the batch script has decided at its end
lives/sacct-<id>          how Slurm's accounts say that a start, or a Slurm job, has ended
```

Nothing here relies on locks: they may not work between machines. Nor on the clocks of machines, which may differ by
minutes: times of files are compared with times of files. A file that another machine may write later is looked for by
reading its folder, which shows what is there: that a file was missing may be remembered for a minute (NFS).
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from paceline.contract.nodejob import NodeJob, Record
from paceline.node.errors import Refused
from paceline.node.files import list_names, read_json
from paceline.node.journal.state import FINAL
from paceline.node.rundir.directory import RunDirectory
from paceline.node.spec import HOLD, SIGNALS, SUSPENDED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.contract.records import AllocationRecord, CodeRecord, DataRecord, SlurmOptions, SlurmOutcome

_NUMBER = re.compile(r"\d+(_\d+)?")  # of a job of Slurm, or of a task of an array
UNSEEN = "paceline-unseen"  # begins the line in slurm.out of a node that does not see the folder
COMMENT = "paceline:"  # begins the comment of a Slurm job; the identifier follows


class Start(NamedTuple):
    """One time that Slurm started a job: the number of the Slurm job, and how often that had been started before."""

    id: str
    restarts: int

    def __str__(self) -> str:
        return f"{self.id}.{self.restarts}"


def current_start() -> Start:
    """That of this process."""
    number = os.environ.get("SLURM_JOB_ID", "")
    restarts = os.environ.get("SLURM_RESTART_COUNT") or "0"
    if not number.isdecimal() or not restarts.isdecimal():
        raise Refused("SLURM_JOB_ID is not set; this is started by the batch script of a job")
    return Start(number, int(restarts))


def own_number() -> str:
    """The number by which Slurm's commands take the job of this process, and no other task of its array.

    One task of an array has the array's own number, too: with that number all of them would be meant.
    """
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


class Identity(NamedTuple):
    """By what a Slurm job is known to be paceline's: its comment has the identifier, unless the site changes it."""

    job_id: str  # paceline's; of an array that of the whole
    name: str  # of the Slurm job
    folder: str  # where it works


HELD = "held"  # see above


@dataclass(frozen=True)
class SlurmJob(Record):
    """What `job.json` holds."""

    parts: ClassVar = {"spec": NodeJob, "node": NodeJob}

    job_id: str
    created: float  # in seconds since the epoch
    spec: NodeJob  # as its user asked for it
    node: NodeJob  # as each node makes its part of it
    options: SlurmOptions
    code: CodeRecord | None = None  # of its copy of its code
    data: tuple[DataRecord, ...] = ()
    terminal: Mapping[str, str] = field(default_factory=dict)
    allocation: AllocationRecord | None = None  # that of its user, in which it runs
    task: tuple[str, int] | None = None  # of one of an array: the identifier of the whole, and its index
    index: Mapping[str, str] | None = None  # the variables that say which one of its array it is


class JobFolder:
    """The folder of a job, see above."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.job = path / "job.json"
        self.script = path / "batch.sh"
        self.output = path / "slurm.out"
        self.stop = path / "stop"
        self.signals = path / SIGNALS
        self.suspended = path / SUSPENDED
        self.code = path / "code" / path.name

    def read(self) -> SlurmJob:
        """What `job.json` holds."""
        found = self.find()
        if found is None:
            raise Refused(f"{self.job} is damaged or gone; delete the job")
        return found

    def find(self) -> SlurmJob | None:
        """The same; None if it is damaged or gone."""
        found = read_json(self.job)
        return None if found is None else SlurmJob.from_json(found)

    @property
    def root(self) -> Path:
        """Paceline's root."""
        return self.path.parent.parent

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has asked to stop it."""
        return self.stop.name in list_names(self.path)

    @property
    def is_suspended(self) -> bool:
        """Whether it is suspended, or about to be."""
        return self._read(self.suspended) in (HOLD, HELD)

    def is_let_go(self) -> None:
        """Note that Slurm has started it although it was held: its user has released it with Slurm's own command."""
        if self._read(self.suspended) == HELD:
            self.suspended.unlink(missing_ok=True)

    def pass_on(self, number: int) -> None:
        """Let the agents of all nodes have a signal for their ranks: Slurm would send it to all processes of a step."""
        with contextlib.suppress(OSError), open(self.signals, "a") as file:
            file.write(f"{number}\n")

    def identity(self, job: SlurmJob) -> Identity:
        """By what its Slurm jobs are known."""
        if not job.task:
            return Identity(job.job_id, self.name, str(self.path))
        array, task = job.task
        return Identity(array, self.name[: -len(f"-{task}")], str(self.path.parent))

    def unseen_by(self, nodes: Sequence[str]) -> str:
        """The line for nodes that do not see it."""
        do = "do" if len(nodes) > 1 else "does"
        return (
            f"{', '.join(nodes)} {do} not see {self.root} of the machine that submitted the job; set root in the"
            " settings to a folder that all nodes share"
        )

    @property
    def last_words(self) -> str:
        """The last line that its batch scripts or srun printed, and where; "" if there is none."""
        with contextlib.suppress(OSError):
            lines = self.output.read_text(errors="replace").strip().splitlines()
            if lines:
                return f"{lines[-1]}; see {self.output}"
        return ""

    # -- the Slurm jobs ------------------------------------------------------------------------------------------------

    @property
    def ids(self) -> list[str]:
        """The numbers of its Slurm jobs, the newest last."""
        return [line for line in self._read(self.path / "ids").split() if _NUMBER.fullmatch(line)]

    def add_id(self, number: str) -> None:
        """Note another Slurm job; one that is noted already is not noted again."""
        if number in self.ids:
            return
        fd = os.open(self.path / "ids", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, f"{number}\n".encode())
        finally:
            os.close(fd)

    # -- starts --------------------------------------------------------------------------------------------------------

    @property
    def starts(self) -> list[Start]:
        """Its starts, the newest last; those of Slurm jobs that are not its own are left out."""
        ids = self.ids
        found = []
        for name in list_names(self.path / "lives"):
            number, _, restarts = name.partition(".")
            is_own = not ids or number in ids or any("_" in known for known in ids)  # a task has another number, too
            if number.isdecimal() and restarts.isdecimal() and is_own:
                found.append(Start(number, int(restarts)))
        return sorted(found, key=lambda start: _order(start, ids))

    def has(self, start: Start, number: str) -> bool:
        """Whether the Slurm job of a start is one of its own, as far as its Slurm jobs are noted."""
        ids = self.ids
        return not ids or number in ids or start.id in ids

    def take_over(self, start: Start) -> Start | None:
        """Make this the start that may work, unless a newer one is there, which is returned.

        Each start first shows that it is there, and then looks for others, so of two at least one sees the other.
        """
        self.of(start).mkdir(parents=True, exist_ok=True)
        (self.of(start) / "followed").touch()
        others = [other for other in self.claimed if other != start]
        ids = self.ids
        newer = [other for other in others if _order(other, ids) > _order(start, ids)]
        if newer:
            return newer[-1]
        for other in others:
            if not self.follower(other):
                (self.of(other) / "followed").write_text(str(start))
        return None

    @property
    def claimed(self) -> list[Start]:
        """Those of its starts of which a node has begun, the newest last."""
        return [start for start in self.starts if "followed" in list_names(self.of(start))]

    def follower(self, start: Start) -> str:
        """The start that has taken the place of this one; "" if none has."""
        return self._read(self.of(start) / "followed")

    def is_over(self, start: Start) -> bool:
        """Whether all nodes of a start that have begun have ended."""
        if self.outcome(start) is not None:
            return True
        runs = {run.path.parent.name: run for run in self.runs(start)}
        parts = [name for name in list_names(self.of(start)) if name.isdecimal()]
        return bool(parts) and all(
            "refused" in list_names(self.of(start) / part)
            or (part in runs and (runs[part].read_status() or {}).get("state") in FINAL)
            for part in parts
        )

    def of(self, start: Start) -> Path:
        """The folder of a start."""
        return self.path / "lives" / str(start)

    def accounted(self, name: str) -> Path:
        """The file with what the accounts say of a start or a Slurm job.

        It is in no folder whose time of change says when something has happened to the job.
        """
        return self.path / "lives" / f"sacct-{name}"

    def part(self, start: Start, node_rank: int) -> Path:
        """The folder in which a node has its run directory."""
        return self.of(start) / str(node_rank)

    def step(self, start: Start) -> str | None:
        """The step of a start, as Slurm's commands take it; None before a node has started."""
        number = self._read(self.of(start) / "step")
        return f"{start.id}.{number}" if number.isdecimal() else None

    def node(self, start: Start, node_rank: int) -> str:
        """Slurm's name of a node; "" before it has started."""
        return self._read(self.part(start, node_rank) / "node")

    def warned(self, start: Start) -> str:
        """What Slurm has announced to the batch script of a start, such as "limit"; "" if nothing."""
        return self._read(self.of(start) / "warned")

    def runs(self, start: Start) -> list[RunDirectory]:
        """The run directories of the nodes of a start, node 0 first."""
        ranks = sorted(int(name) for name in list_names(self.of(start)) if name.isdecimal())
        # A folder that is read anew shows what is there; a file that is looked for may be remembered as missing (NFS).
        paths = [
            self.part(start, rank) / self.name for rank in ranks if self.name in list_names(self.part(start, rank))
        ]
        return [RunDirectory(path) for path in paths if "spec.json" in list_names(path)]

    def refusals(self, start: Start) -> list[tuple[str, float]]:
        """Why the job cannot run on nodes of a start, and when they said so by the clock of the disk."""
        files = [self.of(start) / name / "refused" for name in list_names(self.of(start)) if name.isdecimal()]
        return [(why, file.stat().st_mtime) for file in files if (why := self._read(file))]

    def outcome(self, start: Start) -> SlurmOutcome | None:
        """What the batch script decided at the end of a start; None before it has."""
        file = self.of(start) / "outcome.json"
        found: Any = read_json(file) if file.name in list_names(file.parent) else None
        outcome: SlurmOutcome | None = found
        return outcome

    def _read(self, file: Path) -> str:
        """What is in a small file; "" if it is not there."""
        with contextlib.suppress(OSError):
            return file.read_text().strip() if file.name in list_names(file.parent) else ""
        return ""


def _order(start: Start, ids: list[str]) -> tuple[int, int, int]:
    """The key by which the newest start is the last one."""
    return ids.index(start.id) if start.id in ids else len(ids), int(start.id), start.restarts
