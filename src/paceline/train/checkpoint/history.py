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


def note(step: int, folder: Path) -> None:
    """Note that this job has committed a checkpoint in a folder. Without a run directory, do nothing."""
    path = _path()
    if path is None:
        return
    saved = {"step": step, "folder": str(folder)}
    hidden = path.with_name(f".{NOTE}.{os.getpid()}")
    with contextlib.suppress(OSError):  # the checkpoint is complete even if this cannot be written
        hidden.write_text(json.dumps(saved))
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


def noted(folder: Path) -> int | None:
    """The step of the checkpoint that this job, or the one that it resumes, has committed last; None if there is none.

    Args:
        folder: folder of the checkpoints. A script with several runs has a folder for each (`checkpoints`,
            `checkpoints-2`); notes for other folders do not count.
    """
    path = _path()
    try:
        noted_before = {} if path is None else json.loads(path.read_bytes())
        step, other = noted_before.get("step"), Path(noted_before.get("folder", "")).name
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    if other != folder.name and re.sub(r"-\d+$", "", other) == re.sub(r"-\d+$", "", folder.name):
        return None
    return step if isinstance(step, int) else None


def _path() -> Path | None:
    folder = os.environ.get("PACELINE_RUN_DIR")
    return Path(folder, NOTE) if folder else None
