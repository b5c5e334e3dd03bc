"""What a job has saved before, noted in its run directory.

A job whose checkpoints are gone must not begin anew without a word. The note stays when checkpoints are removed, and a
job that resumes another one has a copy of it.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

NOTE = "saved.json"


def note(step: int, folder: Path) -> None:
    """Note that this job has committed a checkpoint in a folder; without a run directory do nothing."""
    path = _path()
    if path is None:
        return
    hidden = path.with_name(f".{NOTE}.{os.getpid()}")
    with contextlib.suppress(OSError):  # the checkpoint is whole, whether this can be written or not
        hidden.write_text(json.dumps({"step": step, "folder": str(folder)}))
        hidden.replace(path)


def noted() -> int | None:
    """The step of the checkpoint that this job, or the one that it resumes, has committed last; None for none."""
    path = _path()
    try:
        step = None if path is None else json.loads(path.read_bytes())["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _path() -> Path | None:
    folder = os.environ.get("PACELINE_RUN_DIR")
    return Path(folder, NOTE) if folder else None
