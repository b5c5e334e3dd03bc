"""Names of what paceline writes into a user's folders, so that snapshots can leave it out."""

from __future__ import annotations

import os
import re
from pathlib import Path

from paceline.contract import found
from paceline.contract.code_folder import GITIGNORE
from paceline.job.errors import UserError
from paceline.job.paths import jobs_folder

# Beside `code/train` is `code/.train.paceline`, which says that paceline made that folder; while the code is being
# copied, it is in `code/.train.paceline.1a2b3c4d`.
_OURS = re.compile(r"\..+\.paceline(\.[0-9a-f]{8})?", re.DOTALL)


def is_for_code(folder: str) -> bool:
    """Whether paceline made a folder for the code of jobs."""
    try:
        return found.read_of_anyone(Path(folder, ".gitignore")) == GITIGNORE
    except (OSError, ValueError):
        return False


def is_our_name(name: str) -> bool:
    """Whether a file or folder has a name that paceline uses beside the code of jobs."""
    return _OURS.fullmatch(name) is not None


class Ours:
    """Recognises paceline's folders: the folder of jobs, run directories, and the code of jobs."""

    def __init__(self) -> None:
        try:
            jobs = jobs_folder()
        except UserError:  # no home: no jobs in it
            self._homes = frozenset[str]()
        else:
            self._homes = frozenset(os.path.realpath(path) for path in (jobs, jobs.parent))

    def __call__(self, path: str) -> bool:
        """Whether a folder is paceline's. The path is absolute and goes through no symbolic link."""
        parent, name = os.path.split(path)
        if path in self._homes or is_our_name(name) or os.path.lexists(f"{parent}/.{name}.paceline"):
            return True
        files = set(os.listdir(path)) if os.path.isfile(f"{path}/spec.json") else set[str]()
        return files >= {"status.json", "journal.jsonl"}
