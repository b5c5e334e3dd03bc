"""Whether the data of a volume is on this machine."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.node.errors import Refused

from . import mounts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


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


def find(source: Mapping[str, Any], root: str, working_dir: str) -> dict[str, Any]:
    """A volume that a job wants, and whether the job finds it at the path where it wants it."""
    problem = look(source["path"]).problem
    if problem is not None:
        raise Refused(f"volume {source['volume']}, {source['path']}: {problem}; correct it in the settings")
    return placed(source, root, working_dir)


def placed(source: Mapping[str, Any], root: str, working_dir: str) -> dict[str, Any]:
    """The same for a volume that can be read."""
    path, wanted = source["path"], source["wanted"]
    if is_same(path, wanted):
        return {**source, "visible": True, "mount": False, "problem": None}
    problem = mounts.problem(path, wanted, (root, working_dir, sys.prefix, sys.base_prefix))
    return {**source, "visible": problem is None, "mount": problem is None, "problem": problem}


def notes(sources: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lines about the volumes that are not at the path where a job wants them."""
    return [
        f"volume {it['volume']} cannot be mounted at {it['wanted']}: {it['problem']}; "
        f"the job reads its path, {it['path']}, from {it['variable']}"
        for it in sources
        if not it["visible"]
    ]
