"""Reads what ranks and agents append to their files, as it comes."""

from __future__ import annotations

import ctypes
import os
import select
import struct
from typing import TYPE_CHECKING

from .run_directory import read_json

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

CHUNK = 256 * 1024
POLL_SECONDS = 0.05  # where the kernel cannot tell of changes
_IN_MODIFY = 0x2
_IN_CLOEXEC, _IN_NONBLOCK = 0o2000000, 0o4000


class Waker:
    """Wakes a reader when one of the watched files grows (Linux `man 7 inotify`), or every 50 ms without inotify."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.inotify_init1(_IN_CLOEXEC | _IN_NONBLOCK)
        self._paths: dict[int, Path] = {}

    def watch(self, path: Path) -> None:
        """Wake when `path` grows. Read it once afterwards: what came before is not told."""
        if self._fd >= 0:
            watch = self._libc.inotify_add_watch(self._fd, os.fsencode(path), _IN_MODIFY)
            if watch < 0:  # out of watches: poll everything
                self.close()
            else:
                self._paths[watch] = path

    def wait(self, other: int) -> tuple[set[Path] | None, bool]:
        """Wait for growth or for `other` (a descriptor) to be readable.

        Returns the files that grew, None meaning that any may have, and whether `other` is readable.
        """
        if self._fd < 0:
            return None, bool(select.select([other], [], [], POLL_SECONDS)[0])
        ready = select.select([self._fd, other], [], [])[0]
        grown: set[Path] = set()
        if self._fd in ready:
            data = os.read(self._fd, 65536)
            position = 0
            while position < len(data):
                watch, mask, _, length = struct.unpack_from("iIII", data, position)
                if mask & 0x4000:  # IN_Q_OVERFLOW: some news were dropped
                    return None, other in ready
                grown.add(self._paths[watch])
                position += 16 + length
        return grown, other in ready

    def close(self) -> None:
        """Release the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class GrowingFile:
    """A file that others append to, read from where the last read ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by `close`

    def read(self, limit: int = CHUNK) -> bytes:
        """The next bytes, b"" at the end as it is now."""
        data = os.pread(self._file.fileno(), limit, self.offset)
        if not data and os.fstat(self._file.fileno()).st_size < self.offset:
            self.offset = 0  # somebody opened /dev/stdout anew, which empties the file
            data = os.pread(self._file.fileno(), limit, 0)
        self.offset += len(data)
        return data

    def close(self) -> None:
        """Release the descriptor."""
        self._file.close()


class RankLog(GrowingFile):
    """A rank's log without the traceback that ended the rank: that one stands in the failure report, once."""

    def __init__(self, path: Path, error: Path) -> None:
        super().__init__(path)
        self._error = error
        self._passed = False

    def read(self, limit: int = CHUNK) -> bytes:
        """The next bytes to show; a rank records its exception before it prints it, so none is shown too early."""
        if self._passed:
            return super().read(limit)
        before = self.offset
        data = super().read(limit)
        record = read_json(self._error)
        if record is None or record["log_start"] is None or self.offset <= record["log_start"]:
            return data
        if before < record["log_start"]:
            self.offset = record["log_start"]
            return data[: self.offset - before]
        if record["log_end"] is None:
            self.offset = before
            return b""
        self._passed = True
        self.offset = max(before, record["log_end"])
        return super().read(limit)


class Lines:
    """Splits growing files into whole lines."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> Iterable[bytes]:
        """The lines that `data` completes, without their ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines
