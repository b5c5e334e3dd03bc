"""Files that are found, in a folder or one above it, and not named by the user: who may have written them is checked.

Else another user could put a file into a folder such as /tmp, and everybody who works below it would obey.
"""

from __future__ import annotations

import os
import stat
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_MOST = 1 << 20  # bytes; such files are far smaller
_told: set[str] = set()


def read(path: Path) -> bytes | None:
    """The bytes of a file that only this user and root can have written.

    None if there is no file, or if it is another one; of that, a line on stderr says why it is not read.
    """
    try:
        return _read(path, is_checked=True)
    except ValueError as error:
        line = f"paceline: {path} is not read: {error}"
        if line not in _told:
            _told.add(line)
            print("".join(it if it.isprintable() else "?" for it in line), file=sys.stderr)
        return None


def read_of_anyone(path: Path) -> bytes | None:
    """The bytes of a file, whoever has written it; None if there is none."""
    return _read(path, is_checked=False)


def _read(path: Path, *, is_checked: bool) -> bytes | None:
    try:
        status = os.lstat(path) if is_checked else os.stat(path)
        _check(status, is_checked)  # before it is opened: what cannot be opened may belong to another user, too
        if is_checked and _is_foreign(owner := path.parent.stat().st_uid):
            raise ValueError(f"its folder belongs to {_name(owner)}; work in a folder of your own")
        # It may have been replaced by now: by a link, or by a FIFO, which would wait for its other end.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if is_checked else 0))
    except (FileNotFoundError, NotADirectoryError):
        return None
    with open(fd, "rb") as file:
        _check(os.fstat(fd), is_checked)
        data = file.read(_MOST + 1)
    if len(data) > _MOST:
        raise ValueError(f"it is larger than {_MOST >> 20} MiB; remove it")
    return data


def _check(status: os.stat_result, is_checked: bool) -> None:
    """Raise ValueError, which says what to do, if a file is not to be read."""
    if not stat.S_ISREG(status.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no regular file"
        raise ValueError(f"it is {what}; put the file itself there")
    if not is_checked:
        return
    if _is_foreign(status.st_uid):
        raise ValueError(f"it belongs to {_name(status.st_uid)}; make a copy that is yours, or work in another folder")
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_private(status)):
        raise ValueError("others may write it; take that from them with chmod go-w")


def _is_foreign(user: int) -> bool:
    return user not in (0, os.geteuid())


def _is_private(status: os.stat_result) -> bool:
    """Whether the group of a file is that of its owner alone, whose files it may write with the usual umask 002."""
    import grp
    import pwd

    try:
        group, owner = grp.getgrgid(status.st_gid), pwd.getpwuid(status.st_uid)
    except KeyError:  # a container that knows no names
        return status.st_gid == status.st_uid
    return group.gr_name == owner.pw_name and set(group.gr_mem) <= {owner.pw_name}


def _name(user: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
