"""Where the settings are. Reading them takes long to import, and most verbs need not where there are none."""

from __future__ import annotations

import os
from pathlib import Path

PROJECT_FILE = "paceline.toml"


def user_file() -> Path | None:
    """Where the user's settings are, or would be; None for a user without a home."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        base = Path(folder) if os.path.isabs(folder) else Path.home() / ".config"
    except RuntimeError:
        return None
    return base / "paceline" / "config.toml"


def project_file(folder: Path | None = None) -> Path | None:
    """The nearest `paceline.toml` from a folder upwards, or None.

    The search ends with the root of a git repository, the user's home, and the file system.
    """
    try:
        here = (folder or Path.cwd()).resolve()
        device = here.stat().st_dev
        for candidate in (here, *here.parents):
            if candidate.stat().st_dev != device:
                return None
            if (candidate / PROJECT_FILE).exists():
                return candidate / PROJECT_FILE
            if (candidate / ".git").exists() or candidate == _home():
                return None
    except OSError:  # the folder is gone, or one above it may not be entered
        pass
    return None


def _home() -> Path | None:
    try:
        return Path.home().resolve()
    except RuntimeError:
        return None


def exist() -> bool:
    """Whether there are any settings for work in the current folder."""
    user = user_file()
    return project_file() is not None or (user is not None and user.exists())
