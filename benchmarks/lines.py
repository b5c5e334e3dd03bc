"""Reads what ranks write through a command, and checks that no line is lost or torn."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from .lab import TIMEOUT, Lab
from .sample import Failed

_LINE = re.compile(rb"(<(\d+) (\d+) \.+>\n)")


class Reader:
    """The other end of a pipe that a command writes to."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe()
        self.text = bytearray()

    def close(self) -> None:
        """Release the pipe."""
        os.close(self._read)

    def take(self) -> bytes:
        """The next bytes; fails at the end."""
        data = self.read()
        if not data:
            raise Failed(f"ended after {bytes(self.text[-200:])!r}")
        return data

    def drain(self) -> None:
        """Read to the end."""
        while self.read():
            pass

    def read(self) -> bytes:
        """The next bytes; b"" at the end."""
        if not select.select([self._read], [], [], TIMEOUT)[0]:
            raise Failed(f"nothing was written for {TIMEOUT:g} s")
        data = os.read(self._read, 1 << 20)
        self.text += data
        return data


@contextlib.contextmanager
def reading(lab: Lab, command: Sequence[str]) -> Iterator[Reader]:
    """Run a command, and read its stdout; at the end of the block, the command must have succeeded."""
    with contextlib.closing(Reader()) as reader, lab.started(command, pipe=reader.write) as job:
        os.close(reader.write)
        yield reader
        reader.drain()
        job.finish()


@contextlib.contextmanager
def gates(path: Path) -> Iterator[Gates]:
    """Two locks that all ranks wait for: before their first line, and after their last one.

    With the second one, no job ends while lines are measured: the hosts of a test share the cores of one machine.

    Args:
        path: of the first one; the second one's has the suffix `.end`.
    """
    with open(path, "w") as first, open(path.with_suffix(".end"), "w") as last:
        for file in (first, last):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield Gates(first, last)


class Gates(NamedTuple):
    """Locks that hold back ranks."""

    first: IO[str]
    last: IO[str]

    def measure(self, reader: Reader, ranks: int, lines: int, lossy: bool = False) -> float:
        """Let the ranks write; returns the seconds until all lines have arrived.

        If fewer arrive and `lossy` allows it, returns the seconds that all would have taken at the same rate.
        """
        while reader.text.count(b"ready\n") < ranks:
            reader.take()
        began = time.monotonic()
        if lossy:  # their end says that no more lines arrive
            fcntl.flock(self.last, fcntl.LOCK_UN)
        fcntl.flock(self.first, fcntl.LOCK_UN)
        count, wanted = 0, ranks * lines
        while count < wanted:
            data = reader.read() if lossy else reader.take()
            if not data:
                break
            count += data.count(b"\n")
        if not count:
            raise Failed("no line arrived")
        seconds = (time.monotonic() - began) * max(1.0, wanted / count)
        fcntl.flock(self.last, fcntl.LOCK_UN)
        return seconds


def check(text: bytes | bytearray, ranks: int, lines: int) -> None:
    """Check that every line of every rank has arrived complete, and those of a rank in order.

    Raises:
        Failed: one has not.
    """
    numbers: dict[bytes, list[int]] = {}
    for line, rank, number in _LINE.findall(text):
        if len(line) == 100:
            numbers.setdefault(rank, []).append(int(number))
    if len(numbers) != ranks or any(found != list(range(lines)) for found in numbers.values()):
        whole = sum(map(len, numbers.values()))
        raise Failed(f"{whole} of {ranks * lines} lines arrived complete, or those of a rank in another order")
