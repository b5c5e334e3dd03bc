"""Where jobs live on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import UserError


def jobs_folder() -> Path:
    """The folder with one run directory a job: $PACELINE_HOME/jobs, or paceline/jobs in the XDG state folder.

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
