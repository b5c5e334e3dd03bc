"""Which checkpoint a job has committed last, noted in its run directory; its journal has each, and which were loaded.

If the checkpoints of a job are gone, the job must not silently start again. The note is kept when checkpoints are
removed, and a job that resumes another one gets a copy of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from pathlib import Path

NOTE, _JOURNAL = "saved.json", "journal.jsonl"  # `node/rundir/directory.py` lists the files of a run directory
_used: set[str] = set()  # names of the folders with checkpoints that this process has saved or loaded
_saved: set[Path] = set()  # the folders into which it has saved


def used(folder: Path, *, saved: bool = False) -> None:
    """Remember that this process has loaded, or saved, a checkpoint in a folder. Every rank calls this."""
    _used.add(folder.name)
    if saved:
        _saved.add(folder)


def has_saved(folder: Path) -> bool:
    """Whether a run of this process has saved a checkpoint in a folder."""
    return folder in _saved


def note(step: int, folder: Path) -> None:
    """Note that this job has committed a checkpoint in a folder. Without a run directory, do nothing."""
    path = _path()
    if path is None:
        return
    saved = {"step": step, "folder": str(folder)}
    hidden = path.with_name(f".{NOTE}.{os.getpid()}")
    with contextlib.suppress(OSError):  # the checkpoint is complete even if this cannot be written
        steps = {**_steps(path), str(folder): step}
        hidden.write_text(json.dumps({**saved, "steps": steps}))
        hidden.replace(path)
    _record(path, event="checkpoint", **saved)


def resumed(step: int, checkpoint: Path) -> None:
    """Record that this job goes on from a checkpoint. Without a run directory, do nothing."""
    path = _path()
    if path is not None:
        _record(path, event="resumed", step=step, path=str(checkpoint))


def _record(note: Path, **record: object) -> None:
    """Append a record to the journal, if there is one; also behind a line that a full disk has cut off."""
    line = json.dumps({"v": 1, "time": time.time(), **record})
    journal = note.with_name(_JOURNAL)
    with contextlib.suppress(OSError), open(os.open(journal, os.O_WRONLY | os.O_APPEND), "wb", buffering=0) as file:
        file.write(f"\n{line}\n".encode())  # readers skip empty lines


def noted(folder: Path) -> tuple[int, Path] | None:
    """The last checkpoint of this job, or of the one that it resumes: its step, and its folder; None if there is none.

    It may be there still: in the folder of a run of the script that is over.
    """
    # A script with several runs has a folder for each: `checkpoints`, `checkpoints-2`, or as it names them. Those that
    # this process has used, or that differ in their number, are of other runs.
    path = _path()
    saved = {Path(name).name: (step, Path(name)) for name, step in _steps(path).items()} if path is not None else {}
    if folder.name in saved:
        return saved[folder.name]
    if _used & saved.keys():
        return None
    family = re.sub(r"-\d+$", "", folder.name)
    return next((saved[name] for name in reversed(saved) if re.sub(r"-\d+$", "", name) != family), None)


def _steps(note: Path) -> dict[str, int]:
    """The step that was saved last in each folder."""
    try:
        steps = json.loads(note.read_bytes())["steps"]
        return {folder: step for folder, step in steps.items() if isinstance(step, int)}
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return {}


def _path() -> Path | None:
    folder = os.environ.get("PACELINE_RUN_DIR")
    return Path(folder, NOTE) if folder else None
