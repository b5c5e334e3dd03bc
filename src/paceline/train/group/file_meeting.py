"""The `file://` init method: ranks that find each other through a file, which the last one removes.

torch removes such a file when its store is freed, but a group that has been left is never freed here (see
`join.leave`). So the ranks are counted in the file itself.
"""

from __future__ import annotations

import ctypes
import secrets
import time
from pathlib import Path

from torch._C._distributed_c10d import FileStore

_INSIDE = (
    "inside"  # how many ranks have joined and not left, and a random text, so that each change gives another value
)
_REMOVAL_SECONDS = 10.0  # to wait for the rank that removes the file
_POLL_SECONDS = 0.01
_joined: dict[str, FileStore] = {}


def join(path: str, world_size: int) -> FileStore:
    """Join the ranks that meet at a file.

    Raises:
        RuntimeError: the file is that of another run.
    """
    deadline = time.monotonic() + _REMOVAL_SECONDS
    while True:
        store = FileStore(path, world_size)
        inside = _count(store, 1)
        _never_free(store)
        if inside > world_size:
            _count(store, -1)
        if inside > world_size or time.monotonic() > deadline:
            raise RuntimeError(f"{path} is left over from ranks that were killed, or in use by others; remove it")
        if inside:
            _joined[path] = store
            return store
        time.sleep(_POLL_SECONDS)  # the last rank of the previous run will remove it soon


def leave() -> None:
    """Leave all ranks that this process has met at files; the last one of them removes the file."""
    for path, store in _joined.items():
        if _count(store, -1) == 0:
            Path(path).unlink(missing_ok=True)
    _joined.clear()


def _count(store: FileStore, by: int) -> int:
    """Change the number of ranks that are inside; returns the new number. After the last has left, it stays 0."""
    seen, word = "", secrets.token_hex(8)
    while True:
        if seen.startswith("0 "):
            return 0
        inside = int(seen.partition(" ")[0] or 0) + by
        now = store.compare_set(_INSIDE, seen, f"{inside} {word}").decode()
        if now == f"{inside} {word}":
            return inside
        seen = now


def _never_free(store: FileStore) -> None:
    """Keep a store: if it is freed after the file was removed, it makes the file again."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
