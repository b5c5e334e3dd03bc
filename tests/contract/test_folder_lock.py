"""A folder's lock is for the user whose job saves there: others can neither hold it nor keep a restart from it."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from paceline.contract.folder_lock import LOCK, FolderLock, holder_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

DEAD = {
    "what": "paceline's lock of a folder for checkpoints", "job": "dead", "jobs": [], "attempt": 0, "rank": 0,
    "pid": 1 << 22, "host": "h", "boot": "",
}  # fmt: skip

# Becomes another user in the folder, and locks, in every way in which that works, each file that it can open.
READER = """
import fcntl, os, struct, sys
os.chdir(sys.argv[1])
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
held, locked = [], []
for name in sorted(os.listdir()):
    try:
        held.append(os.open(name, os.O_RDONLY))
    except PermissionError:
        continue
    fcntl.flock(held[-1], fcntl.LOCK_EX)
    fcntl.lockf(held[-1], fcntl.LOCK_SH)
    locked.append(name)
print(*locked, flush=True)
sys.stdin.read()
"""
# Becomes another user, and takes the folder as a job of that user would.
OTHER_JOB = """
import os, sys
from pathlib import Path
from paceline.contract.folder_lock import FolderLock
os.chdir(sys.argv[1])
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    FolderLock(Path(), 0)
    print("taken")
except OSError as error:
    print(type(error).__name__, error.strerror)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that everyone may read."""
    path = tmp_path / "checkpoints"
    path.mkdir()
    path.chmod(0o755)
    return path


@contextlib.contextmanager
def reader(folder: Path) -> Iterator[list[str]]:
    """The files that a process of another user holds locked."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", READER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()
        finally:
            process.kill()


def leave(path: Path, mode: int) -> None:
    """What a killed job leaves."""
    path.write_text(json.dumps(DEAD) + "\n")
    path.chmod(mode)


def test_who_can_read_the_folder_keeps_no_restart_from_it(folder: Path) -> None:
    leave(folder / LOCK, 0o600)
    with reader(folder) as locked:
        assert locked == []
        lock = FolderLock(folder, 0)
        assert lock.is_held
        assert os.listdir(folder) == [LOCK]
        lock.release()
    assert os.listdir(folder) == []


def test_only_its_user_may_open_the_file(folder: Path) -> None:
    umask = os.umask(0)
    try:
        lock = FolderLock(folder, 0)
    finally:
        os.umask(umask)
    assert stat.S_IMODE((folder / LOCK).stat().st_mode) == 0o600
    with reader(folder) as locked:
        assert locked == []
    assert f"pid {os.getpid()}" in (holder_of(folder) or "another process")
    lock.release()


def test_a_file_that_was_opened_to_all_is_closed_to_them(folder: Path) -> None:
    leave(folder / LOCK, 0o666)
    lock = FolderLock(folder, 0)
    assert stat.S_IMODE((folder / LOCK).stat().st_mode) == 0o600
    lock.release()


def test_what_another_user_left_is_said_in_a_line(folder: Path) -> None:
    folder.chmod(0o777)
    leave(folder / LOCK, 0o600)
    done = subprocess.run([sys.executable, "-c", OTHER_JOB, str(folder)], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == (
        f"PermissionError {LOCK} there belongs to user root; if no job of theirs saves there any more, have them "
        "remove it, else choose another folder\n"
    )
    assert json.loads((folder / LOCK).read_text()) == DEAD


def test_what_is_not_ours_is_not_removed(folder: Path) -> None:
    (folder / LOCK).write_text("mine")
    with pytest.raises(OSError, match="is not paceline's; move it away"):
        FolderLock(folder, 0)
    assert (folder / LOCK).read_text() == "mine"
