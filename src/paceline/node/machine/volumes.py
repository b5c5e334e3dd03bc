"""Whether the data of a volume is on this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.node.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Mapping


class Look(NamedTuple):
    """Why a folder or file cannot be read (None: it can), and the bytes of its file system."""

    problem: str | None
    size: int | None = None
    free: int | None = None


def look(path: str) -> Look:
    """Try to read a folder or file."""
    try:
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                next(entries, None)
        else:
            with open(path, "rb") as file:
                file.read(1)
        space = os.statvfs(path)
        return Look(None, space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize)
    except OSError as error:
        return Look((error.strerror or str(error)).lower())


def is_same(path: str, wanted: str) -> bool:
    """Whether a volume is visible at the path that a job wants."""
    try:
        return os.path.samefile(path, wanted)
    except (OSError, ValueError):
        return False


def find(source: Mapping[str, Any]) -> dict[str, Any]:
    """A volume that a job wants, and whether it is visible at the path that the job wants.

    Raises:
        Refused: it cannot be read.
    """
    problem = look(source["path"]).problem
    if problem is not None:
        raise Refused(f"volume {source['volume']}, {source['path']}: {problem}; correct it in the settings")
    return {**source, "visible": is_same(source["path"], source["wanted"])}
