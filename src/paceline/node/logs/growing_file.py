"""Reads what ranks and agents append to their files, as it comes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from paceline.node.rundir.directory import read_error

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

CHUNK = 256 * 1024


class GrowingFile:
    """A file that others append to, read from where the last read ended.

    Attributes:
        offset: where the next read begins.
        more: whether the last read left something that was there already.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.more = False
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by `close`

    def read(self, limit: int = CHUNK) -> bytes:
        """The next bytes, b"" at the end as it is now."""
        data = os.pread(self._file.fileno(), limit, self.offset)
        if not data and self.status().st_size < self.offset:
            self.offset = 0  # somebody opened /dev/stdout anew, which empties the file
            data = os.pread(self._file.fileno(), limit, 0)
        self.offset += len(data)
        self.more = len(data) == limit
        return data

    def peek(self, position: int, length: int) -> bytes:
        """Bytes from anywhere."""
        return os.pread(self._file.fileno(), length, position)

    def status(self) -> os.stat_result:
        """Size and times as they are now."""
        return os.fstat(self._file.fileno())

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
        record = read_error(self._error)
        if record is None or record.get("log_start") is None or self.offset <= record["log_start"]:
            return data
        if before < record["log_start"]:
            self.offset = record["log_start"]
            self.more = True
            return data[: self.offset - before]
        if record.get("log_end") is None:
            self.offset = before
            self.more = False
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
