"""The time index of an attempt: the sizes of its log files over time.

The ranks write their logs themselves, without times. The agent watches the files grow, and appends the new sizes to
`logs/<attempt>/times`, one line per moment. From time to time a line that starts with `=` names all files, so that a
reader can start there:

```
=1763715845.120 0o:0 1o:0 1e:0     seconds since the epoch, then rank, stream (o or e) and size of each file
1763715845.634 0o:112 1o:98
1763715850.218 1e:1043
```
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from paceline.node.eventloop.inotify import Waker
from paceline.node.files import regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from paceline.node.eventloop.loop import Loop

    Sizes = dict[bytes, int]  # b"3o" → bytes

BATCH_SECONDS = 0.05  # between two lines while ranks write all the time
POLL_SECONDS = 1.0  # between two lines if there is no inotify
_FULL_EVERY = 64 * 1024  # bytes of index between two lines that name all files
_BLOCK = 1024 * 1024
_LONGEST = 16 * 1024 * 1024  # bytes of a line; what is longer is no index


class TimeIndex:
    """Writes the index of the current attempt, from callbacks of the agent's loop."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waker: Waker | None = None
        self._fd = -1
        self._keys: Mapping[Path, bytes] = {}
        self._sizes: dict[Path, int] = {}
        self._since_full = 0

    def start(self, path: Path, files: Mapping[Path, bytes]) -> None:
        """Start the index of an attempt; `files` are its logs and their names in it. A full disk is no error."""
        self.end()
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._keys, self._sizes, self._since_full = files, dict.fromkeys(files, 0), 0
        self._write(files, full=True)
        waker = self._waker = Waker()
        for file in files:
            waker.watch(file)
        self._update(waker)

    def end(self) -> None:
        """Write the last sizes: the attempt is over."""
        if self._waker is None:
            return
        self._write_changes(None)
        if self._waker.fd >= 0:
            self._loop.forget(self._waker.fd)
        self._waker.close()
        self._waker = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _update(self, waker: Waker) -> None:
        """Write what has grown. If something has, do so again after a pause; else write the next growth at once."""
        if waker is not self._waker:  # the attempt is over
            return
        if self._write_changes(waker.grown()) or waker.fd < 0:
            self._loop.after(POLL_SECONDS if waker.fd < 0 else BATCH_SECONDS, lambda: self._update(waker))
        else:
            self._loop.watch(waker.fd, lambda: self._woken(waker))

    def _woken(self, waker: Waker) -> None:
        self._loop.forget(waker.fd)
        self._update(waker)

    def _write_changes(self, grown: set[Path] | None) -> bool:
        """Write the sizes that changed; returns whether any did."""
        changed = []
        for path in self._keys if grown is None else filter(grown.__contains__, self._keys):
            try:
                size = path.stat().st_size
            except OSError:
                continue
            if size != self._sizes[path]:
                self._sizes[path] = size
                changed.append(path)
        if changed and self._since_full >= max(_FULL_EVERY, 256 * len(self._keys)):
            self._write(self._keys, full=True)
        elif changed:
            self._write(changed)
        return bool(changed)

    def _write(self, paths: Iterable[Path], full: bool = False) -> None:
        items = b"".join(b" %s:%d" % (self._keys[path], self._sizes[path]) for path in paths)
        line = b"%s%.3f%s\n" % (b"=" if full else b"", time.time(), items)
        self._since_full = 0 if full else self._since_full + len(line)
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._fd, line)


def moments(path: Path, begin: int = 0) -> Iterator[tuple[float, Sizes]]:
    """The times and sizes in an index, from a position that `find` returned; none if there is no index."""
    try:
        file = open(path, "rb", opener=regular)  # noqa: SIM115 - closed below
    except OSError:
        return
    with file:
        file.seek(begin)
        while (line := file.readline(_LONGEST)).endswith(b"\n"):
            moment = _parse(line)
            if moment is not None:
                yield moment


def find(path: Path, is_early: Callable[[float, Sizes], bool], most: int | None = None) -> int:
    """The position to read an index from: its last line that names all files and is early enough."""
    try:
        file = open(path, "rb", opener=regular)  # noqa: SIM115 - closed below
    except OSError:
        return 0
    with file:
        end = size = file.seek(0, os.SEEK_END)
        found = 0
        while end > 0 and (most is None or size - end < most):
            begin = max(0, end - _BLOCK)
            file.seek(begin)
            block = file.read(end - begin + 1)  # one byte more, since a mark is two
            mark = len(block)
            while (mark := block.rfind(b"\n=", 0, mark)) >= 0:
                found = begin + mark + 1
                file.seek(found)
                moment = _parse(file.readline())
                if moment is not None and is_early(*moment):
                    return found
            end = begin
        return 0 if end <= 0 else found


def _parse(line: bytes) -> tuple[float, Sizes] | None:
    """A line of an index; None if a full disk or a killed agent has left it incomplete."""
    if not line.endswith(b"\n"):
        return None
    try:
        when, *items = line.lstrip(b"=").split()
        return float(when), {key: int(size) for key, _, size in (item.partition(b":") for item in items)}
    except ValueError:
        return None
