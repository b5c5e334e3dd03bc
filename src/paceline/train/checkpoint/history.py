"""Which checkpoint a job has committed last, noted in its run directory.

If the checkpoints of a job are gone, the job must not silently start again. The note is kept when checkpoints are
removed, and a job that resumes another one gets a copy of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

NOTE = "saved.json"


def note(step: int, folder: Path) -> None:
    """Note that this job has committed a checkpoint in a folder. Without a run directory, do nothing."""
    path = _path()
    if path is None:
        return
    hidden = path.with_name(f".{NOTE}.{os.getpid()}")
    with contextlib.suppress(OSError):  # the checkpoint is complete even if this cannot be written
        hidden.write_text(json.dumps({"step": step, "folder": str(folder)}))
        hidden.replace(path)


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
