"""The folder of a Slurm job, on a disk that the login node and the nodes of the cluster share.

```
job.json                  the job, as its user asked for it, and its identifier
code/<name>               the copy of its code, if it has its own
batch.sh                  the script that sbatch got
ids                       the numbers of its Slurm jobs, one per line; --chain adds some
slurm.out                 what the batch scripts and srun printed
stop                      somebody has asked to stop it
current                   the life that may work; agents of another one end
checkpoints               where the library saves, unless the job says
lives/<id>.<restarts>/    one time that Slurm started it
    step                  the number of its step in Slurm
    <node rank>/<name>    the run directory of a node
    <node rank>/refused   why the job cannot run on that node
    warned                what Slurm announced: that the time limit is near, or a preemption
    outcome.json          what the batch script has decided at its end
```

Nothing here relies on locks: they may not work between machines.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.node.errors import Refused
from paceline.node.files import read_json
from paceline.node.rundir.directory import MARKER, RunDirectory
from paceline.node.rundir.staging import remove_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_NUMBER = re.compile(r"\d+(_\d+)?")  # of a job of Slurm, or of a task of an array
_BUILDING = ".new"  # ends the name of a folder that is being made
_ABANDONED = 3600.0  # seconds after which one has been left by a client that was ended
COMMENT = "paceline:"  # begins the comment of a Slurm job; the identifier follows


class Life(NamedTuple):
    """One time that Slurm started a job: the number of the Slurm job, and how often that had been started before."""

    id: str
    restarts: int

    def __str__(self) -> str:
        return f"{self.id}.{self.restarts}"


def current_life() -> Life:
    """That of this process.

    Raises:
        Refused: it is not part of a Slurm job.
    """
    number = os.environ.get("SLURM_JOB_ID", "")
    restarts = os.environ.get("SLURM_RESTART_COUNT") or "0"
    if not number.isdecimal() or not restarts.isdecimal():
        raise Refused("SLURM_JOB_ID is not set; this is started by the batch script of a job")
    return Life(number, int(restarts))


def own_number() -> str:
    """The number by which Slurm's commands take the job of this process, and no other task of its array.

    One task of an array has the array's own number, too: with that number all of them would be meant.
    """
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


class JobFolder:
    """The folder of a job, see above."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.job = path / "job.json"
        self.script = path / "batch.sh"
        self.output = path / "slurm.out"
        self.stop = path / "stop"
        self.current = path / "current"
        self.code = path / "code" / path.name

    def read(self) -> dict[str, Any]:
        """What `job.json` holds.

        Raises:
            Refused: it is damaged.
        """
        found = read_json(self.job)
        if found is None:
            raise Refused(f"{self.job} is damaged or gone; delete the job")
        return found

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
        try:
            return [line for line in (self.path / "ids").read_text().split() if _NUMBER.fullmatch(line)]
        except OSError:
            return []

    def add_id(self, number: str) -> None:
        """Note another Slurm job; one that is noted already is not noted again."""
        if number in self.ids:
            return
        fd = os.open(self.path / "ids", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, f"{number}\n".encode())
        finally:
            os.close(fd)

    # -- lives ---------------------------------------------------------------------------------------------------------

    @property
    def lives(self) -> list[Life]:
        """Its lives, the newest last."""
        order = {number: position for position, number in enumerate(self.ids)}
        found = []
        for name in _names(self.path / "lives"):
            number, _, restarts = name.partition(".")
            if number.isdecimal() and restarts.isdecimal():
                found.append(Life(number, int(restarts)))
        return sorted(found, key=lambda life: (order.get(life.id, len(order)), int(life.id), life.restarts))

    def of(self, life: Life) -> Path:
        """The folder of a life."""
        return self.path / "lives" / str(life)

    def part(self, life: Life, node_rank: int) -> Path:
        """The folder in which a node has its run directory."""
        return self.of(life) / str(node_rank)

    def step(self, life: Life) -> str | None:
        """The step of a life, as Slurm's commands take it; None before a node has started."""
        with contextlib.suppress(OSError):
            number = (self.of(life) / "step").read_text()
            return f"{life.id}.{number}" if number.isdecimal() else None
        return None

    def runs(self, life: Life) -> list[RunDirectory]:
        """The run directories of the nodes of a life, node 0 first."""
        ranks = sorted(int(name) for name in _names(self.of(life)) if name.isdecimal())
        # A folder that is read anew shows what is there; a file that is looked for may be remembered as missing (NFS).
        paths = [self.part(life, rank) / self.name for rank in ranks if self.name in _names(self.part(life, rank))]
        return [RunDirectory(path) for path in paths if "spec.json" in _names(path)]

    def refusals(self, life: Life) -> list[str]:
        """Why the job cannot run on nodes of a life."""
        found = []
        for name in _names(self.of(life)):
            with contextlib.suppress(OSError):
                found.append((self.of(life) / name / "refused").read_text().strip())
        return found

    def outcome(self, life: Life) -> dict[str, Any] | None:
        """What the batch script decided at the end of a life; None before it has."""
        return read_json(self.of(life) / "outcome.json")


class Jobs:
    """The folders of jobs below paceline's root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / "slurm"

    def __iter__(self) -> Iterator[JobFolder]:
        return (JobFolder(self.path / name) for name in _names(self.path) if not name.startswith("."))

    def find(self, name: str) -> JobFolder | None:
        """The job of this name."""
        folder = JobFolder(self.path / name)
        return folder if not name.startswith(".") and "/" not in name and (folder.path / MARKER).exists() else None

    def named(self, names: Iterable[str]) -> list[JobFolder]:
        """Those of these jobs that are here."""
        return [folder for name in names if (folder := self.find(name)) is not None]

    def of(self, name: str) -> JobFolder:
        """The job of this name.

        Raises:
            Refused: there is none.
        """
        found = self.find(name)
        if found is None:
            raise Refused(f"no job {name}")
        return found

    def new(self, name: str) -> JobFolder:
        """A folder to fill for a new job; it becomes the job by `settle`.

        Raises:
            OSError: it cannot be made.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.path / f".{name}.{os.uname().nodename}.{os.getpid()}{_BUILDING}" / name
        path.mkdir(mode=0o700, parents=True)
        RunDirectory(path).mark()
        return JobFolder(path)

    def settle(self, building: JobFolder) -> JobFolder | None:
        """Give a new folder its place; None if there is a job of its name already."""
        place = self.path / building.name
        try:
            os.rename(building.path, place)  # fails if the other folder has files, and each has
        except OSError:
            if os.path.lexists(place):
                return None
            raise
        self.discard(building)
        return JobFolder(place)

    def sweep(self) -> None:
        """Remove what clients have left that were ended while they made or removed a job."""
        for name in _names(self.path):
            left = self.path / name
            with contextlib.suppress(OSError):
                if (
                    name.startswith(".")
                    and name.endswith(_BUILDING)
                    and time.time() - left.stat().st_mtime > _ABANDONED
                ):
                    for inner in _names(left):
                        remove_folder(left / inner)
                    left.rmdir()

    def discard(self, building: JobFolder) -> None:
        """Remove a folder that did not become a job, or what is left of it."""
        remove_folder(building.path)
        with contextlib.suppress(OSError):
            building.path.parent.rmdir()

    def remove(self, folder: JobFolder) -> None:
        """Remove a job: first its name, in one step, then its files.

        Raises:
            Refused: it cannot be removed.
        """
        hidden = self.path / f".{folder.name}.{os.uname().nodename}.{os.getpid()}{_BUILDING}"
        try:
            hidden.mkdir(mode=0o700, exist_ok=True)
            os.rename(folder.path, hidden / folder.name)
        except FileNotFoundError:
            return
        except OSError as error:
            raise Refused(f"cannot remove {folder.path}: {error.strerror}; remove it by hand") from None
        if not remove_folder(hidden / folder.name):
            raise Refused(f"cannot remove all of {hidden}; remove it by hand")
        with contextlib.suppress(OSError):
            hidden.rmdir()


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
