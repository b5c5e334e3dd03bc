"""The export of a job on this machine, for a job on another target that resumes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from paceline.backends.base import JobExport
from paceline.backends.moving import receiver
from paceline.backends.refusals import refusals
from paceline.job.errors import UserError
from paceline.node.store import moving

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.backends.base import ProgressReporter
    from paceline.node.rundir.directory import RunDirectory


def export_of_run(run: RunDirectory, *, fresh: bool) -> JobExport:
    """Its code and newest checkpoint; see `Moves`."""
    name = run.path.name
    found = moving.inventory(run)

    def fetch(what: Literal["code", "checkpoint"], file: Path, progress: ProgressReporter) -> None:
        ids = found["checkpoint"]["ids"] if found["checkpoint"] else {}
        try:
            with refusals(), run.kept(), receiver(what, found, name, file, progress) as out:
                if what == "code":
                    moving.write_code(run, out, fresh=fresh)
                else:
                    moving.write_checkpoint(run, ids, out)
        except FileNotFoundError:
            raise UserError(f"job {name} was just deleted") from None

    return JobExport(name, "this machine", found, fetch)
