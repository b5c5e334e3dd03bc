"""Which jobs were submitted from here to a target, so that verbs find them without `--on`."""

from __future__ import annotations

import contextlib

from paceline.job.paths import target_folder
from paceline.node.files import write_json


def note(target: str, name: str) -> None:
    """Note a job. If that cannot be written, verbs need `--on`."""
    folder = target_folder(target)
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(folder / name, {"name": name})


def forget(target: str, name: str) -> None:
    """Drop the note of a job."""
    with contextlib.suppress(OSError):
        (target_folder(target) / name).unlink()
