"""What a job has saved before, noted in its run directory.

A job whose checkpoints are gone must not begin anew without a word. The note stays when checkpoints are removed, and a
job that resumes another one has a copy of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
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


def noted(folder: Path) -> int | None:
    """The step of the checkpoint that this job, or the one that it resumes, has committed last; None for none.

    Args:
        folder: where it should be. A script with several runs has a folder for each (`checkpoints`, `checkpoints-2`);
            what was noted for another one does not count.
    """
    path = _path()
    try:
        said = {} if path is None else json.loads(path.read_bytes())
        step, other = said.get("step"), Path(said.get("folder", "")).name
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    if other != folder.name and re.sub(r"-\d+$", "", other) == re.sub(r"-\d+$", "", folder.name):
        return None
    return step if isinstance(step, int) else None


def _path() -> Path | None:
    folder = os.environ.get("PACELINE_RUN_DIR")
    return Path(folder, NOTE) if folder else None
