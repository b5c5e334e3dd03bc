"""Where the settings are, and their keys. Reading them takes long to import, and few verbs need that without any."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from paceline.contract import found

PROJECT_FILE = "paceline.toml"
_NAME = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|[\w-]+)"""
_KEY = rf"{_NAME}(?:\s*\.\s*{_NAME})*"
_TABLE, _VALUE = re.compile(rf"\s*\[+\s*({_KEY})\s*\]+\s*(?:#.*)?"), re.compile(rf"\s*({_KEY})\s*=")


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

    The search ends with the root of a git repository, the user's home, and the file system. It passes by a file that
    another user may have written (`contract/found.py`).
    """
    try:
        here = (folder or Path.cwd()).resolve()
        device = here.stat().st_dev
        for candidate in (here, *here.parents):
            if candidate.stat().st_dev != device:
                return None
            if _is_taken(candidate / PROJECT_FILE):
                return candidate / PROJECT_FILE
            if (candidate / ".git").exists() or candidate == _home():
                return None
    except OSError:  # the folder is gone, or one above it may not be entered
        pass
    return None


def _is_taken(file: Path) -> bool:
    try:
        return found.read(file) is not None
    except OSError:  # whoever loads it says why
        return True


def _home() -> Path | None:
    try:
        return Path.home().resolve()
    except RuntimeError:
        return None


def exist() -> bool:
    """Whether there are any settings for work in the current folder."""
    user = user_file()
    return project_file() is not None or (user is not None and user.exists())


def place_of(file: Path, key: tuple[str, ...]) -> str:
    """FILE:LINE of the line that sets a key, or else of the one that sets what is above it; FILE if none does."""
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    table: tuple[str, ...] = ()
    matched, found = 0, ""
    for number, line in enumerate(lines, 1):
        if heading := _TABLE.fullmatch(line):
            here = table = _names(heading[1])
        elif value := _VALUE.match(line):
            here = (*table, *_names(value[1]))
        else:
            continue
        shared = min(len(here), len(key))
        if shared > matched and here[:shared] == key[:shared]:
            matched, found = shared, f":{number}"
    return f"{file}{found}"


def _names(key: str) -> tuple[str, ...]:
    return tuple(_unquoted(name) for name in re.findall(_NAME, key))


def _unquoted(name: str) -> str:
    if name[0] != '"':
        return name.strip("'")
    try:
        return str(json.loads(name))  # its escapes are those of TOML, but for \\U
    except ValueError:
        return name
