"""What containers print, as the nodes keep it: with times, in files that are rotated."""

from __future__ import annotations

import asyncio
import os
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from multidict import MultiMapping


def _stamp(late: float) -> str:
    return (datetime.now(timezone.utc) - timedelta(seconds=late)).strftime("%Y-%m-%dT%H:%M:%S.%f") + "000Z"


class Log:
    """The output of one run of a container."""

    def __init__(self, path: Path, limit: int, late: float = 0.0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.limit = limit  # bytes, then it is rotated
        self._late = late  # seconds that the clock of its node is behind
        self.ended = False
        self.rotations = 0
        self._rest = b""
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (until it ends)
        self._changed = asyncio.Event()

    def write(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines:
            stamp = _stamp(self._late).encode()
            self._file.write(b"".join(b"%s %s\n" % (stamp, line) for line in lines))
            self._notify()
            if self._file.tell() > self.limit:
                self.rotate()

    def rotate(self) -> None:
        """Begin a new file; the lines of before cannot be read any more."""
        self._file.close()
        os.replace(self.path, f"{self.path}.1")
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        self.rotations += 1
        self._notify()

    def end(self) -> None:
        if not self.ended:
            if self._rest:
                self._file.write(b"%s %s" % (_stamp(self._late).encode(), self._rest))
            self.ended = True
            self._file.close()
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def tail(self, size: int) -> str:
        """The last bytes, without times."""
        lines = self.path.read_bytes().splitlines(keepends=True)[-80:]
        return b"".join(line.partition(b" ")[2] for line in lines).decode(errors="replace")[-size:]

    async def read(self, query: MultiMapping[str]) -> AsyncIterator[bytes]:
        """What a request for logs gets, piece by piece; ends when it is rotated, and when the container has ended."""
        follow = query.get("follow") in ("true", "1")
        with_times = query.get("timestamps") in ("true", "1")
        since = _since(query)
        rotations = self.rotations
        with open(self.path, "rb") as file:
            lines = file.read().splitlines(keepends=True)
            if lines and not lines[-1].endswith(b"\n") and not self.ended:
                file.seek(-len(lines.pop()), os.SEEK_CUR)
            if since:
                lines = [line for line in lines if line.partition(b" ")[0] >= since]
            if query.get("tailLines") is not None:
                count = int(query["tailLines"])
                lines = lines[-count:] if count else []
            limit = int(query.get("limitBytes") or 1 << 60)
            while True:
                data = b"".join(line if with_times else line.partition(b" ")[2] for line in lines)[:limit]
                limit -= len(data)
                if data:
                    yield data
                changed = self._changed
                lines = file.readlines()
                if lines:
                    continue
                if not follow or self.ended or rotations != self.rotations or limit <= 0:
                    break
                await changed.wait()


def _since(query: MultiMapping[str]) -> bytes:
    if query.get("sinceSeconds"):
        moment = datetime.now(timezone.utc) - timedelta(seconds=int(query["sinceSeconds"]))
        return moment.strftime("%Y-%m-%dT%H:%M:%S.%f").encode()
    return (query.get("sinceTime") or "")[: len("2026-11-21T20:04:19")].encode()  # nodes are told whole seconds
