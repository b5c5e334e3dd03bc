"""The `file://` init method: ranks that find each other through a file, which the last one removes.

torch removes such a file when its store is freed, but a group that has been left is never freed here (see
`join.leave`). So the ranks are counted in a file beside it, which is locked while a rank joins or leaves: a store of
torch remembers how far it has read, and would miss the keys of a file that was made anew under the same name.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import FileStore

if TYPE_CHECKING:
    from collections.abc import Iterator

_COUNT = ".ranks"  # added to the file's name: the file with the number of ranks that have joined and not left
_joined: list[str] = []


def join(path: str, world_size: int) -> FileStore:
    """Join the ranks that meet at a file."""
    with _locked(path + _COUNT) as count:
        inside = _read(count) if os.path.exists(path) else 0
        if inside >= world_size:
            raise RuntimeError(f"{path} is left over from ranks that were killed, or in use by others; remove it")
        store = FileStore(path, world_size)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))  # freed after the file was removed, it would make it again
        _write(count, inside + 1)
    _joined.append(path)
    return store


def leave() -> None:
    """Leave all ranks that this process has met at files; the last one of them removes the file."""
    while _joined:
        path = _joined.pop()
        with _locked(path + _COUNT) as count:
            inside = _read(count) - 1
            _write(count, inside)
            if inside <= 0:
                for name in (path, path + _COUNT):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[int]:
    """A descriptor of a file that no other process has locked, and that is there under this name."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # who can only read may not lock it
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_there(file, path):  # not removed while this process waited
                yield file
                return
        finally:
            os.close(file)


def _is_there(file: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _read(count: int) -> int:
    text = os.pread(count, 20, 0).decode()
    return int(text) if text.isdecimal() else 0


def _write(count: int, inside: int) -> None:
    os.ftruncate(count, 0)
    os.pwrite(count, str(inside).encode(), 0)
