"""The lock of a folder for checkpoints: one job at a time saves there, and others can find out which one.

The lock is `flock` on the file `.paceline-holder` in the folder. Whoever can open a file can lock it, so only its user
may open this one, from its beginning on. The kernel releases the lock when its process ends, for whatever reason. The
file names the holder, as JSON, and is removed with the lock. Children of the holder do not hold it. On a network file
system the lock is as reliable as `flock` between machines there. A later attempt of a job replaces the file of one
whose machine does not answer, so a holder must look before it writes whether it still is one (`is_kept`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import socket
import time
import weakref
from typing import TYPE_CHECKING, TypedDict, cast

from .machine import boot_id

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

LOCK = ".paceline-holder"
_WHAT = "paceline's lock of a folder for checkpoints"
_HEAD = json.dumps({"what": _WHAT})[:-1].encode()  # of the file
_MOST = 65536  # bytes of it
_MODE = 0o600
_PATIENCE = 2.0  # seconds for a holder that was just killed to be gone, or for one that only looks
_OWN_PATIENCE = 30.0  # the same for the attempt before of the same job
_PAUSE = 0.02  # seconds between two tries
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_GONE = (errno.ENOENT, errno.ESTALE)


class Holder(TypedDict, total=False):
    """What the file says of the process that holds it; nothing while that is just writing it."""

    what: str
    job: str | None
    jobs: list[str]  # names of this job's runs before, and its own
    attempt: int
    rank: int
    pid: int
    host: str
    boot: str


class FolderTaken(Exception):
    """Another process holds the folder; the message says which one."""


class FolderLock:
    """Holds the lock of a folder until `release`, or until the object or the process is gone.

    Within a process a folder may be locked several times; it is free when all have released it.

    Attributes:
        is_held: False if the file system has no locks, so that no process can hold the folder.
    """

    def __init__(self, folder: Path, rank: int, jobs: Iterable[str] = ()) -> None:
        """Take the lock, waiting a moment for a holder that was just killed."""
        who = _me(rank, jobs)
        status = os.stat(folder)
        key = (status.st_dev, status.st_ino)
        entry = _held.get(key)
        if entry is None or not _is_at(entry.fd, folder / LOCK):
            fd = _take(folder / LOCK, who)
            entry = None if fd is None else _Held(fd, folder / LOCK)
            if entry is not None:
                _held[key] = entry
        if entry is not None:
            entry.count += 1
        self.is_held = entry is not None
        self._entry = entry
        self.release = weakref.finalize(self, _release, key, entry)

    def is_kept(self) -> bool:
        """Whether nobody has replaced or removed the file since it was locked, as far as there are locks."""
        if self._entry is None:
            return True
        try:  # a network file system asks the server when a file is opened
            fd = os.open(self._entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                return os.path.samestat(os.fstat(self._entry.fd), os.fstat(fd))
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in _GONE:
                return False
            raise


def holder_of(folder: Path) -> str | None:
    """The holder of a folder, for messages; None if there is none, as far as this process can know."""
    try:
        fd = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _describe(_holder(os.pread(fd, _MOST, 0)))
    except OSError:
        pass
    finally:
        os.close(fd)
    return None


class _Held:
    """A lock of this process, and how many have taken it."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path
        self.count = 0


_held: dict[tuple[int, int], _Held] = {}  # by device and inode of the folder


def _take(path: Path, who: Holder) -> int | None:
    """A descriptor that holds the lock; None where the file system has none."""
    begin = time.monotonic()
    while True:
        fd = _open(path)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _wait(fd, path, who, time.monotonic() - begin)
                continue
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    _remove_if_ours(fd, path)
                    return None
                raise
            if not _is_at(fd, path):  # its last holder has just removed it
                continue
            if not _is_ours(os.pread(fd, _MOST, 0)):
                raise OSError(errno.EEXIST, f"{path.name} there is not paceline's; move it away", str(path))
            os.ftruncate(fd, 0)
            try:
                os.pwrite(fd, (json.dumps(who) + "\n").encode(), 0)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # else it holds the lock, and has no name
                    raise
            kept, fd = fd, -1
            return kept
        finally:
            if fd >= 0:
                os.close(fd)


def _open(path: Path) -> int:
    """Open the file, and make it if there is none."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, _MODE)
    except PermissionError as error:
        owner = _owner(path)
        if owner is None:
            raise
        why = (
            f"{path.name} there belongs to {owner}; if no job of theirs saves there any more, have them remove it, "
            "else choose another folder"
        )
        raise PermissionError(error.errno, why, str(path)) from None
    status = os.fstat(fd)
    if status.st_mode & 0o777 & ~_MODE and status.st_uid == os.geteuid() and _is_ours(os.pread(fd, _MOST, 0)):
        with contextlib.suppress(OSError):  # somebody has changed its mode, or the file system has none
            os.fchmod(fd, _MODE)
    return fd


def _owner(path: Path) -> str | None:
    """The other user to whom a file belongs; None if there is none, or the file is this user's."""
    try:
        user = path.lstat().st_uid
    except OSError:
        return None
    if user == os.geteuid():
        return None
    try:
        return f"user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"user {user}"


def _wait(fd: int, path: Path, who: Holder, waited: float) -> None:
    """Wait a moment for the holder to release the lock."""
    holder = _holder(os.pread(fd, _MOST, 0))
    if waited > _PATIENCE and _is_lost(holder, who):
        _remove_if_ours(fd, path)
    elif waited > (_OWN_PATIENCE if _is_same_job(holder, who) else _PATIENCE):
        raise FolderTaken(_describe(holder))
    time.sleep(_PAUSE)


def _release(key: tuple[int, int], entry: _Held | None) -> None:
    if entry is None or entry.fd < 0:  # as in a forked child, which never held it
        return
    entry.count -= 1
    if entry.count == 0:
        if _held.get(key) is entry:
            del _held[key]
        with contextlib.suppress(OSError):
            _remove_if_ours(entry.fd, entry.path)
        os.close(entry.fd)


def _leave_to_parent() -> None:
    for entry in _held.values():
        os.close(entry.fd)
        entry.fd = -1
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _remove_if_ours(fd: int, path: Path) -> None:
    if _is_ours(os.pread(fd, _MOST, 0)) and _is_at(fd, path):
        path.unlink()


def _me(rank: int, jobs: Iterable[str]) -> Holder:
    attempt = os.environ.get("PACELINE_ATTEMPT", "")
    return {
        "what": _WHAT,
        "job": os.environ.get("PACELINE_JOB"),
        "jobs": sorted(jobs),
        "attempt": int(attempt) if attempt.isdigit() else 0,
        "rank": rank,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "boot": boot_id(),
    }


def _is_ours(text: bytes) -> bool:
    """Whether paceline wrote a file; one whose maker was killed may have less than the beginning."""
    return text[: len(_HEAD)] == _HEAD[: len(text)]


def _holder(text: bytes) -> Holder:
    """What the file says; {} where its maker is just writing it."""
    try:
        holder = json.loads(text)
    except ValueError:
        return {}
    return cast("Holder", holder) if _is_ours(text) and isinstance(holder, dict) else {}


def _is_at(fd: int, path: Path) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _is_same_job(holder: Holder, who: Holder) -> bool:
    """Whether the holder is an earlier attempt of this job."""
    return not set(who["jobs"]).isdisjoint(holder.get("jobs", ())) and holder["attempt"] < who["attempt"]


def _is_lost(holder: Holder, who: Holder) -> bool:
    """Whether a file server keeps the lock of a process that is gone; on this machine the kernel knows."""
    if not holder.get("boot") or not who["boot"] or holder["boot"] == who["boot"]:
        return False
    return holder["host"] == who["host"] or _is_same_job(holder, who)


def _describe(holder: Holder) -> str:
    if "pid" not in holder:
        return "another process"
    process = f"rank {holder['rank']}, pid {holder['pid']} on {holder['host']}"
    return f"job {holder['job']} ({process})" if holder["job"] else f"another run ({process})"
