"""A job that goes on from one of another target: what its machines get of it, and where."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract.nodejob import Brought
from paceline.job.errors import UserError

from .base import JobExport

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO, Literal

    from paceline.contract.records import CodeRecord, Inventory
    from paceline.job.spec import JobSpec
    from paceline.node.store.moving import Writable

    from .base import ProgressReporter


def brought(spec: JobSpec, export: JobExport) -> Brought:
    """What its machines are asked to do with the checkpoint.

    The folder for checkpoints is that of the old job: its own folder, the same place in its copy of the code, the same
    path or volume; or what the user names for the new job.
    """
    found = export.inventory
    checkpoint, saved = found["checkpoint"], found["saved"]
    if spec.fresh:
        return Brought()
    if checkpoint is None:
        if saved is not None:
            raise UserError(
                f"job {export.name} has saved step {saved['step']} in {saved['folder']} on {export.where}, and no "
                "whole checkpoint is there any more; to begin anew, add --fresh"
            )
        has_files = found["place"] == "run" and found["files"]  # that the script has saved there itself
        return Brought("run", found["path"]) if has_files else Brought()
    into: str = found["place"]
    path, volume = found["path"], None if found["volume"] is None else (found["volume"][0], found["volume"][1])
    if spec.checkpoint_dir is not None and spec.checkpoint_dir != found["checkpoint_dir"]:
        into, path, volume = "folder", spec.checkpoint_dir, None
    elif into == "code":
        into = ""
    return Brought(into, path, volume, checkpoint["ids"], {"step": checkpoint["step"], "folder": path})


def notes(spec: JobSpec, export: JobExport) -> list[str]:
    """Lines for the user."""
    found = list(export.notes)
    if export.inventory["has_others"] and not spec.fresh:
        path = export.inventory["path"]
        found.append(f"{path} on {export.where} has files that are no checkpoints of paceline; they stay there")
    return found


def fetched_code(export: JobExport, file: Path, progress: ProgressReporter) -> CodeRecord | None:
    """Get the archive of a job's code; returns its record, None if the job has no copy of its code."""
    code = export.inventory["code"]
    if code is None:
        return None
    export.fetch("code", file, progress)
    return code


def fetched_checkpoint(export: JobExport, file: Path, progress: ProgressReporter) -> None:
    """Get the archive of a job's newest checkpoint."""
    needed, free = export.inventory["bytes"], shutil.disk_usage(file.parent).free
    if needed > free:
        raise UserError(
            f"the checkpoint of job {export.name} needs {needed / 1e6:.1f} MB in {file.parent.parent} on its way here,"
            f" and {free / 1e6:.1f} MB are free; set TMPDIR to a larger disk"
        )
    export.fetch("checkpoint", file, progress)


def export_of(
    name: str,
    where: str,
    inventory: Inventory,
    write: Callable[[Literal["code", "checkpoint"], dict[str, str], Writable], None],
    notes: tuple[str, ...] = (),
) -> JobExport:
    """A job for another target; `write` gets what to write, the ids of its checkpoints, and what takes the archive."""
    ids = inventory["checkpoint"]["ids"] if inventory["checkpoint"] else {}

    def fetch(what: Literal["code", "checkpoint"], file: Path, progress: ProgressReporter) -> None:
        total = inventory["bytes"] if what == "checkpoint" else None
        with file.open("wb") as opened:
            write(what, ids, _Progress(f"fetching the {what} of {name}", opened, total, progress))

    return JobExport(name, where, inventory, fetch, notes)


class _Progress:
    """Writes to a file, and shows how much of it is there."""

    def __init__(self, what: str, file: BinaryIO, total: int | None, progress: ProgressReporter) -> None:
        self._what, self._file, self._total, self._progress = what, file, total, progress

    def write(self, data: bytes) -> int:
        """Write it all."""
        try:
            self._file.write(data)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            folder = Path(self._file.name).parent
            raise UserError(f"{self._what}: no space left in {folder}; set TMPDIR to a larger disk") from None
        self._progress(self._what, self._file.tell(), self._total)
        return len(data)
