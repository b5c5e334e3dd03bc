"""The folder of this machine with its jobs, for clients here and elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.node.errors import Refused
from paceline.node.files import read_json

from . import records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.contract.nodejob import NodeJob
    from paceline.node.rundir.directory import RunDirectory


class Home:
    """This machine's jobs below a folder. Machines may share the folder; each has its own part of a job there.

    Attributes:
        jobs: folder of the run directories of this machine.
        is_remote: whether its clients are on other machines, and send paceline with their requests.
    """

    def __init__(self, root: Path, jobs: Path | None = None, *, is_remote: bool | None = None) -> None:
        """The folders need not exist yet."""
        self.root = root
        self.is_remote = jobs is None if is_remote is None else is_remote
        self.jobs = jobs or root / "hosts" / os.uname().nodename / "jobs"

    def folder_of(self, job: NodeJob) -> Path:
        """Where the run directory of a job is, or will be."""
        folder = Path(job.log_dir).absolute() if job.log_dir else self.jobs
        return folder / job.name

    def runs(self, names: Sequence[str]) -> list[RunDirectory]:
        """The run directories of those of these jobs that are here."""
        return [run for name in names if (run := records.find(self.jobs, name)) is not None]

    def run(self, name: str) -> RunDirectory:
        """The run directory of a job."""
        for run in self.runs([name]):
            return run
        raise Refused(f"no job {name}")

    def remove(self, run: RunDirectory) -> None:
        """Remove a job that has ended, and its code."""
        from .code_folder import discard
        from .lifecycle import remove

        if users := run.users:
            user = users[0].name
            raise Refused(f"job {user} keeps its checkpoints in the folder of job {run.path.name}; delete {user} first")
        code = (read_json(run.job) or {}).get("code")
        job_id = (read_json(run.spec) or {}).get("job_id")
        remove(run.path, lambda: None if code is None or not job_id else discard(Path(code["path"]), job_id))
