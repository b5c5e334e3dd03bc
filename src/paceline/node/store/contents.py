"""What the removal of a job removes: its checkpoints, and how many bytes its files have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract.checkpoint import MANIFEST, NAME
from paceline.node.files import read_json

from .code_folder import is_claimed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.node.rundir.directory import RunDirectory


def contents(run: RunDirectory) -> dict[str, int]:
    """The checkpoints and bytes in the run directory of a job, and in its copy of the code if that lies elsewhere."""
    folder = Path(os.path.realpath(run.path))
    code = (read_json(run.job) or {}).get("code") or {}
    job_id = (read_json(run.spec) or {}).get("job_id")
    copy = Path(os.path.realpath(code["path"])) if isinstance(code.get("path"), str) else folder
    has_copy = folder not in (copy, *copy.parents) and isinstance(job_id, str) and is_claimed(copy, job_id)
    return contents_of([folder, *([copy] if has_copy else [])])


def contents_of(folders: Iterable[Path]) -> dict[str, int]:
    """The checkpoints and bytes in folders. A file with several names counts once; what cannot be read is left out."""
    sizes: dict[tuple[int, int], int] = {}
    checkpoints = 0
    for folder in folders:
        for parent, _, files in os.walk(folder):
            checkpoints += MANIFEST in files and NAME.fullmatch(os.path.basename(parent)) is not None
            for name in files:
                try:
                    status = os.lstat(os.path.join(parent, name))
                except OSError:
                    continue
                sizes[status.st_dev, status.st_ino] = status.st_size
    return {"checkpoints": checkpoints, "size": sum(sizes.values())}
