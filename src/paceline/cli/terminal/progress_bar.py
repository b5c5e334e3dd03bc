"""A progress bar for operations that take longer than a second."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TYPE_CHECKING, TextIO

import click

from paceline.job.text import printable

if TYPE_CHECKING:
    from types import TracebackType

_PATIENCE = 1.0  # seconds before anything is shown
_PERIOD = 0.1  # seconds between two pictures
_BAR = 30  # columns


class ProgressLine:
    """Shows progress on stderr: nothing at first, then a bar on a terminal, and one line in a pipe.

    It is called with what is being done, how much is done, and how much there is (None if unknown):

        with ProgressLine() as progress:
            code.fetch(..., progress, warn=progress.say)
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._next = time.monotonic() + _PATIENCE
        self._shown = ""
        self._is_drawn = False

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wipe()

    def __call__(self, what: str, done: int, total: int | None, now: str = "") -> None:
        """Show it, unless it is too early or nothing is new."""
        time_now = time.monotonic()
        if time_now < self._next:
            return
        what = printable(what)
        if self._is_terminal:
            self._next = time_now + _PERIOD
            columns = shutil.get_terminal_size().columns - 1
            self._write("\r" + _picture(what, done, total, printable(now))[:columns] + "\x1b[K")
            self._is_drawn = True
        elif what != self._shown:
            self._shown = what
            self._write(f"paceline: {what if total in (None, 100) else f'{what} ({total:,})'}…\n")

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._wipe()
        self._write(f"paceline: {printable(line)}\n")

    def _wipe(self) -> None:
        if self._is_drawn:
            self._write("\r\x1b[K")
            self._is_drawn = False

    def _write(self, text: str) -> None:
        click.echo(text, file=self._stream, nl=False, color=True)


def _picture(what: str, done: int, total: int | None, now: str) -> str:
    if not total:
        return f"{what}: {done:,}" if done else f"{what}: {now}" if now else f"{what} …"
    share = min(done / total, 1.0)
    bar = "#" * int(share * _BAR)
    return f"{what} [{bar:-<{_BAR}}] {share:4.0%}" + ("" if total == 100 else f"  {done:,}/{total:,}")
