"""The folder of this machine's jobs. All that asks for it raises `UserError` as `jobs_folder` does."""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import shlex
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONTENTS = (
    "jobs",
    "queue",
    "targets",
    "environment",
    "hosts",
    "silent",
    "notify",
    "trusted",
    "paceline-",
)  # what paceline's names there begin with


def jobs_folder() -> Path:
    """The folder with one run directory per job: $PACELINE_HOME/jobs, or paceline/jobs in the XDG state folder."""
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
    """Where is noted which jobs were submitted from here to a target, a file each."""
    return jobs_folder().parent / "targets" / target


def targets_with(name: str) -> list[str]:
    """The targets that a job of this name was submitted to from here."""
    return sorted(path.parent.name for path in target_folder("x").parent.glob(f"*/{glob.escape(name)}"))


def where_flags_of(name: str, target: str, where: str, hosts: Sequence[str] | None = None) -> str:
    """The flags that find a job of this target: `where`, but none if it was noted here that it is there, on `hosts`."""
    if os.path.lexists(jobs_folder() / name) or targets_with(name) != [target]:
        return where
    noted = _options(target_folder(target) / name)
    is_there = where == f" --on {shlex.quote(target)}" or (noted is not None and noted["hosts"] == list(hosts or ()))
    return "" if is_there else where


def targets_in_use() -> list[str]:
    """The targets that jobs were submitted to from here, and are not deleted."""
    return sorted({path.parent.name for path in target_folder("x").parent.glob("*/[!.]*")})


def submitted_options(target: str, name: str) -> dict[str, Any] | None:
    """The options of the hosts that flags named when a job was submitted to them from here; at least `hosts`.

    None if a target was named instead.
    """
    return _options(target_folder(target) / name)


def jobs_on_named_hosts(target: str, since: float) -> list[tuple[str, dict[str, object]]]:
    """The jobs submitted from here to hosts that flags named, and their options; none that ended before."""
    found = []
    for note in sorted(target_folder(target).glob("[!.]*")):
        options = _options(note)
        if options is not None and _ended(note) >= since:
            found.append((note.name, options))
    return found


def _options(note: Path) -> dict[str, object] | None:
    try:
        stored = json.loads(note.read_bytes())
        options = stored["options"]
        return {**options, "hosts": [str(host) for host in options["hosts"]]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _ended(note: Path) -> float:
    """When a job had ended when it was seen last; infinite if it had not."""
    from .job import FINAL  # most callers need nothing of it

    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(note.read_bytes())["record"]
        if record["state"] in FINAL and record["finished"] is not None:
            return float(record["finished"])
    return math.inf


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
