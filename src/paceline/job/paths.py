"""The folder of this machine's jobs."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import stat
from pathlib import Path

from .errors import UserError

_CONTENTS = ("jobs", "queue", "targets", "hosts", "silent", "paceline-")  # what paceline's names there begin with


def jobs_folder() -> Path:
    """The folder with one run directory per job: $PACELINE_HOME/jobs, or paceline/jobs in the XDG state folder.

    Raises:
        UserError: neither is set, and the user has no home.
    """
    home = os.environ.get("PACELINE_HOME")
    if home:
        return Path(home).absolute() / "jobs"
    state = os.environ.get("XDG_STATE_HOME")
    if state:
        return Path(state).absolute() / "paceline" / "jobs"
    try:
        return Path.home() / ".local" / "state" / "paceline" / "jobs"
    except RuntimeError:
        raise UserError("this user has no home folder to keep jobs in; set PACELINE_HOME to a folder") from None


def target_folder(target: str) -> Path:
    """Where is noted which jobs were submitted from here to a target, a file each.

    Raises:
        UserError: see `jobs_folder`.
    """
    return jobs_folder().parent / "targets" / target


def targets_with(name: str) -> list[str]:
    """The targets that a job of this name was submitted to from here.

    Raises:
        UserError: see `jobs_folder`.
    """
    return sorted(path.parent.name for path in target_folder("x").parent.glob(f"*/{glob.escape(name)}"))


def submitted_hosts(target: str, name: str) -> list[str]:
    """The hosts that a job was submitted to from here, node 0 first.

    Raises:
        UserError: what is noted of it is damaged.
    """
    note = target_folder(target) / name
    try:
        return [str(host) for host in json.loads(note.read_bytes())["hosts"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{note} is damaged; say where job {name} is with --on or -H") from None


def make_private(home: Path) -> None:
    """Make a folder for jobs with mode 0700, or set that mode if it contains only paceline's files.

    Any other folder, such as /tmp, is not changed. Errors are ignored here; they are reported by whatever writes there.
    """
    with contextlib.suppress(OSError):
        home.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            home.mkdir(mode=0o700)
        status = home.stat()
        is_open = stat.S_IMODE(status.st_mode) & 0o077 and status.st_uid == os.getuid()
        if is_open and all(name.startswith(_CONTENTS) for name in os.listdir(home)):
            home.chmod(0o700)
