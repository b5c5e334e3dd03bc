"""Files that ranks and agents append to, read while they grow."""

from __future__ import annotations

import contextlib
import os
from io import FileIO
from typing import TYPE_CHECKING

from paceline.node.files import regular
from paceline.node.rundir.directory import read_error

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

CHUNK = 256 * 1024


class GrowingFile:
    """A file that other processes append to; each read continues where the last one ended.

    Attributes:
        offset: where the next read begins.
        more: whether the last read stopped before the end of the file.
        is_traceback: whether the last read is of the traceback that ended a rank.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.more = False
        self.is_traceback = False
        self._file = FileIO(path, opener=regular)

    def read(self, limit: int = CHUNK) -> bytes:
        """The next bytes; b"" at the current end."""
        data = os.pread(self._file.fileno(), limit, self.offset)
        if not data and self.status().st_size < self.offset:
            self.offset = 0  # a program opened /dev/stdout again, which empties the file
            data = os.pread(self._file.fileno(), limit, 0)
        self.offset += len(data)
        self.more = len(data) == limit
        return data

    def peek(self, position: int, length: int) -> bytes:
        """Bytes from any position."""
        return os.pread(self._file.fileno(), length, position)

    def status(self) -> os.stat_result:
        """The current size and times."""
        return os.fstat(self._file.fileno())

    def reopen(self) -> None:
        """Open it anew: another machine's last bytes may be seen only then (NFS). Reads continue where they were."""
        with contextlib.suppress(OSError):  # it was removed
            fresh = FileIO(self.path, opener=regular)
            self._file.close()
            self._file = fresh

    def close(self) -> None:
        """Release the descriptor."""
        self._file.close()


class RankLog(GrowingFile):
    """A rank's log, in which the traceback that ended the rank is told apart, as the failure report shows it."""

    def __init__(self, path: Path, error: Path, *, keeps_traceback: bool) -> None:
        """Open it."""
        super().__init__(path)
        self._error = error
        self._keeps = keeps_traceback
        self._passed = False

    def read(self, limit: int = CHUNK) -> bytes:
        """The next bytes. A rank records its exception before it prints it, so its traceback is always known as one."""
        self.is_traceback = False
        if self._passed:
            return super().read(limit)
        before = self.offset
        data = super().read(limit)
        record = read_error(self._error)
        start = None if record is None else record.get("log_start")
        if record is None or start is None or self.offset <= start:
            return data
        if before < start:
            self.offset = start
            self.more = True
            return data[: self.offset - before]
        end = record.get("log_end")
        if self._keeps and (end is None or before < end):
            self.is_traceback = True
            if end is not None and self.offset > end:
                self.offset, self.more = end, True
            return data[: self.offset - before]
        if end is None:
            self.offset = before
            self.more = False
            return b""
        self._passed = True
        self.offset = max(before, end)
        return super().read(limit)


class Lines:
    """Splits growing files into complete lines."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> Iterable[bytes]:
        """The lines that `data` completes, without their ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines
