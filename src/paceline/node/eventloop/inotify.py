"""Changes of files and folders, as the kernel reports them (`man 7 inotify`)."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


POLL_SECONDS = 0.05  # between two checks if there is no inotify
BATCH_SECONDS = 0.02  # between two wake-ups of a reader whose files grow all the time

MODIFY, CLOSE_WRITE, MOVED_TO, DELETE = 0x2, 0x8, 0x80, 0x200
EXCL_UNLINK = 0x4000000  # a file that was removed from the folder reports nothing more
OVERFLOW = 0x4000  # the kernel dropped events
IGNORED = 0x8000  # the watched folder is gone
_CLOEXEC, _NONBLOCK = 0o2000000, 0o4000
_READ_BYTES = 256 * 1024  # the kernel keeps 16384 events


class Event(NamedTuple):
    """One event: the watch that `Inotify.add` returned, what happened, and the name of the file in a watched folder."""

    watch: int
    mask: int
    name: str


class Inotify:
    """A queue of events from the kernel; if there is none, `fd` is -1, and everything must be polled."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.inotify_init1(_CLOEXEC | _NONBLOCK)

    def add(self, path: str | Path, mask: int) -> int:
        """Watch a file or folder for these events; returns the watch, or -1 if it cannot be watched."""
        watch: int = self._libc.inotify_add_watch(self.fd, os.fsencode(path), mask) if self.fd >= 0 else -1
        return watch

    def read(self) -> bytes:
        """Events that have not been read yet, as the kernel packs them; empty if there are none."""
        try:
            return os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        """Release the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def unpack(data: bytes) -> Iterator[Event]:
    """The events that `Inotify.read` returned."""
    position = 0
    while position < len(data):
        watch, mask, _, length = struct.unpack_from("iIII", data, position)
        position += 16 + length
        yield Event(watch, mask, data[position - length : position].rstrip(b"\0").decode(errors="replace"))


class Waker(Inotify):
    """Wakes a reader when one of the watched files grows, or regularly without inotify.

    The kernel does not report what other machines write to a shared disk.
    """

    def __init__(self, poll: float | None = None) -> None:
        """Watch nothing yet."""
        super().__init__()
        self._seconds = POLL_SECONDS if poll is None else poll
        if poll is not None:
            self.close()
        self._paths: dict[int, Path] = {}
        self._woken = 0.0

    def watch(self, path: Path) -> None:
        """Wake when `path` grows. Read it once afterwards: earlier growth is not reported."""
        watch = self.add(path, MODIFY)
        if watch < 0:  # out of watches: poll everything
            self.close()
        else:
            self._paths[watch] = path

    def grown(self) -> set[Path] | None:
        """The files that grew since the last call; None if any may have grown."""
        if self.fd < 0:
            return None
        # Events of a watched file have no name, so all have one size. There may be many: no object for each.
        events = {(watch, mask) for watch, mask, _, _ in struct.iter_unpack("iIII", self.read())}
        if any(mask & OVERFLOW for _, mask in events):
            return None
        return {self._paths[watch] for watch, _ in events}

    def wait(self, *others: int) -> tuple[set[Path] | None, set[int]]:
        """Wait for growth or for one of `others` (descriptors) to be readable.

        The first growth after a pause is reported at once, later growth in batches, which leaves time to the writers.
        """
        watched = [fd for fd in (self.fd, *others) if fd >= 0]
        ready = set(select.select(watched, [], [], self._seconds if self.fd < 0 else None)[0])
        if ready == {self.fd} and (early := self._woken + BATCH_SECONDS - time.monotonic()) > 0:
            ready |= set(select.select(others, [], [], early)[0])
        self._woken = time.monotonic()
        return self.grown() if self.fd < 0 or self.fd in ready else set(), ready - {self.fd}
