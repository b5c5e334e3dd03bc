"""A job that goes on from one of another target: what its machines get of it, and where."""

from __future__ import annotations

import errno
import shutil
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import Literal

    from paceline.contract.records import Inventory
    from paceline.job.spec import JobSpec

    from .base import JobExport, ProgressReporter

    Source = TypeVar("Source")


def brought(spec: JobSpec, export: JobExport) -> dict[str, Any]:
    """What its machines are asked to do with the checkpoint, as `plan.Brought`.

    The folder for checkpoints is that of the old job: its own folder, the same place in its copy of the code, the same
    path or volume; or what the user names for the new job.
    """
    found = export.inventory
    checkpoint, saved = found["checkpoint"], found["saved"]
    nothing: dict[str, Any] = {"into": "", "path": "", "volume": None, "ids": {}, "saved": None}
    if spec.fresh:
        return nothing
    if checkpoint is None:
        if saved is not None:
            raise UserError(
                f"job {export.name} has saved step {saved['step']} in {saved['folder']} on {export.where}, and no "
                "whole checkpoint is there any more; to begin anew, add --fresh"
            )
        has_files = found["place"] == "run" and found["files"]  # that the script has saved there itself
        return {**nothing, "into": "run", "path": found["path"]} if has_files else nothing
    into: str = found["place"]
    path, volume = found["path"], found["volume"]
    if spec.checkpoint_dir is not None and spec.checkpoint_dir != found["checkpoint_dir"]:
        into, path, volume = "folder", spec.checkpoint_dir, None
    elif into == "code":
        into = ""
    return {
        "into": into,
        "path": path,
        "volume": volume,
        "ids": checkpoint["ids"],
        "saved": {"step": checkpoint["step"], "folder": path},
    }


def notes(spec: JobSpec, export: JobExport) -> list[str]:
    """Lines for the user."""
    found = list(export.notes)
    if export.inventory["has_others"] and not spec.fresh:
        path = export.inventory["path"]
        found.append(f"{path} on {export.where} has files that are no checkpoints of paceline; they stay there")
    return found


def fetched_code(export: JobExport, file: Path, progress: ProgressReporter) -> dict[str, Any] | None:
    """Get the archive of a job's code; returns its record, None if the job has no copy of its code."""
    code = export.inventory["code"]
    if code is None:
        return None
    export.fetch("code", file, progress)
    return {key: value for key, value in code.items() if key != "path"}


def fetched_checkpoint(export: JobExport, file: Path, progress: ProgressReporter) -> None:
    """Get the archive of a job's newest checkpoint."""
    needed, free = export.inventory["bytes"], shutil.disk_usage(file.parent).free
    if needed > free:
        raise UserError(_no_room(export, needed, file.parent))
    export.fetch("checkpoint", file, progress)


class Receiver:
    """Writes what is fetched to a file, and shows how much of it is there."""

    def __init__(self, what: str, name: str, file: Path, total: int | None, progress: ProgressReporter) -> None:
        self._what, self._file, self._total, self._progress = f"fetching the {what} of {name}", file, total, progress
        self._done = 0
        self._open = file.open("wb")

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def write(self, data: bytes) -> int:
        """Write it all."""
        try:
            self._open.write(data)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise UserError(
                f"{self._what}: no space left in {self._file.parent}; set TMPDIR to a larger disk"
            ) from None
        self._done += len(data)
        self._progress(self._what, self._done, self._total)
        return len(data)


def receiver(
    what: Literal["code", "checkpoint"], inventory: Inventory, name: str, file: Path, progress: ProgressReporter
) -> Receiver:
    """What writes an archive to a file."""
    total = inventory["bytes"] if what == "checkpoint" else None
    return Receiver(what, name, file, total, progress)


def newest(answers: Iterable[tuple[Source, Inventory]]) -> tuple[Source, Inventory]:
    """Of several machines and what they have, the one with the newest checkpoint; the first if none has any."""

    def age(it: tuple[Source, Inventory]) -> tuple[int, int]:
        checkpoint = it[1]["checkpoint"]
        return (-1, -1) if checkpoint is None else (checkpoint["serial"], checkpoint["step"])

    return max(answers, key=age)


def _no_room(export: JobExport, needed: int, folder: Path) -> str:
    free = shutil.disk_usage(folder).free
    return (
        f"the checkpoint of job {export.name} needs {needed / 1e6:.1f} MB in {folder.parent} on its way here, and"
        f" {free / 1e6:.1f} MB are free; set TMPDIR to a larger disk"
    )
