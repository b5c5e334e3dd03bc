"""Changes of files and folders, from the kernel (`man 7 inotify`)."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


POLL_SECONDS = 0.05  # where the kernel cannot tell of changes


BATCH_SECONDS = 0.02  # a reader of what grows all the time is woken so often


_MODIFY, _CREATE, _MOVED_TO = 0x2, 0x100, 0x80  # Linux `man 7 inotify`


_OVERFLOW = 0x4000  # some news were dropped


_CLOEXEC, _NONBLOCK = 0o2000000, 0o4000


_NEWS = 256 * 1024  # bytes: the kernel keeps 16384 events


class _Inotify:
    """News of files from the kernel; `fd` is -1 where it gives none, and everything has to be polled."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.inotify_init1(_CLOEXEC | _NONBLOCK)

    def _add(self, path: Path, mask: int) -> int:
        watch: int = self._libc.inotify_add_watch(self.fd, os.fsencode(path), mask) if self.fd >= 0 else -1
        return watch

    def _news(self) -> bytes:
        try:
            return os.read(self.fd, _NEWS)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        """Release the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Waker(_Inotify):
    """Wakes a reader when one of the watched files grows, or every 50 ms without inotify."""

    def __init__(self) -> None:
        super().__init__()
        self._paths: dict[int, Path] = {}
        self._woken = 0.0

    def watch(self, path: Path) -> None:
        """Wake when `path` grows. Read it once afterwards: what came before is not told."""
        watch = self._add(path, _MODIFY)
        if watch < 0:  # out of watches: poll everything
            self.close()
        else:
            self._paths[watch] = path

    def grown(self) -> set[Path] | None:
        """The files that grew since the last look; None where any may have."""
        if self.fd < 0:
            return None
        events = {(watch, mask) for watch, mask, _, _ in struct.iter_unpack("iIII", self._news())}
        if any(mask & _OVERFLOW for _, mask in events):
            return None
        return {self._paths[watch] for watch, _ in events}

    def wait(self, *others: int) -> tuple[set[Path] | None, set[int]]:
        """Wait for growth or for one of `others` (descriptors) to be readable.

        After a quiet time growth is told at once, and else in batches: that leaves time to those who write.

        Returns the files that grew, None meaning that any may have, and the readable ones of `others`.
        """
        watched = [fd for fd in (self.fd, *others) if fd >= 0]
        ready = set(select.select(watched, [], [], POLL_SECONDS if self.fd < 0 else None)[0])
        if ready == {self.fd} and (early := self._woken + BATCH_SECONDS - time.monotonic()) > 0:
            ready |= set(select.select(others, [], [], early)[0])
        self._woken = time.monotonic()
        return self.grown() if self.fd < 0 or self.fd in ready else set(), ready - {self.fd}


class FolderWaker(_Inotify):
    """Tells that something came into a folder."""

    def watch(self, path: Path) -> None:
        """Tell of what comes into `path` from now on; one that does not exist is not watched."""
        self._add(path, _CREATE | _MOVED_TO)

    def clear(self) -> None:
        """Take note of what was told."""
        if self.fd >= 0:
            self._news()
