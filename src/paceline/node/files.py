"""Small files that are read and written as a whole, and whether the disk has space for them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_BYTES = 64 * 1024 * 1024  # of a file that is read as a whole; files of paceline are far smaller
_ROOM = 64 * 1024  # bytes; a disk with less free space counts as full
_MOST_DEPTH = 100  # nested objects and arrays; files of paceline have far fewer


def write_json(path: Path, value: Any, *, durably: bool = False) -> None:
    """Replace the file `path` atomically by `value` in JSON; with `durably` it survives a loss of power."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(value))
        if durably:
            _sync(temporary)
        os.replace(temporary, path)
        if durably:
            _sync(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _sync(path: Path) -> None:
    """Have the disk write a file, or the entries of a folder."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None if there is none that can be read."""
    try:
        return load_json(path)
    except (OSError, ValueError):
        return None


def load_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None when there is no such file."""
    try:
        text = read_regular(path)
    except FileNotFoundError:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no object")
    if text.count(b"{") + text.count(b"[") > _MOST_DEPTH and _depth(value) > _MOST_DEPTH:
        raise ValueError(f"{path.name} is nested too deeply")  # else showing it would fail
    return value


class Irregular(OSError):
    """A device, a FIFO or a folder stands where a file is expected."""


def list_names(folder: Path) -> list[str]:
    """Return what a folder has, sorted; nothing if it cannot be read. NFS may remember that a file was missing."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def regular(path: str, flags: int) -> int:
    """Open a regular file, as the opener of `open`; reading anything else might never end."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Irregular(errno.EINVAL, "it is no regular file", path)
    return fd


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file. A run directory may contain other things, such as a FIFO, which would never end."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path.name} is no regular file")
        data = file.read(MOST_BYTES + 1) if status.st_size <= MOST_BYTES else b""
        if status.st_size > MOST_BYTES or len(data) > MOST_BYTES:
            raise ValueError(f"{path.name} is larger than {MOST_BYTES >> 20} MiB")
        return data


def is_disk_full(folder: Path) -> bool:
    """Whether the file system of a folder has no space left for another file; False if that is unknown."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return False
    return space.f_bavail * space.f_frsize < _ROOM


def _depth(value: Any) -> int:
    """The depth of nested objects and arrays."""
    depth, level = 0, [value]
    while level and depth <= _MOST_DEPTH:
        level = [item for it in level for item in (it.values() if isinstance(it, dict) else it)
                 if isinstance(item, (dict, list))]  # fmt: skip
        depth += 1
    return depth
