"""What a verb writes, and what ends it from outside."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import re
import select
import signal
import sys
from typing import TYPE_CHECKING, Any, TextIO

import click

from paceline.job.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LONGEST = 64  # characters of the parameters of an SGR sequence
_SGR = rf"\x1b\[[0-9;:]{{0,{_LONGEST}}}m"
# A line end, a tab, and the carriage return of progress bars stay; C1 controls are those of Unicode.
_SPECIAL = re.compile(rf"({_SGR})|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_BEGUN = re.compile(rf"\x1b(\[[0-9;:]{{0,{_LONGEST}}})?\Z")


def write(target: int, data: bytes) -> None:
    """Write all of `data`, unchanged, to a descriptor."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:  # the parent process made it non-blocking
            select.select([], [target], [])


def say(text: str) -> None:
    """Print a line of paceline's own on stderr; control characters of what it cites are escaped."""
    click.echo(f"paceline: {printable(text)}", err=True)


_said: set[str] = set()  # by `say_once`


def say_once(text: str) -> None:
    """Print a line of paceline's own on stderr, unless it has been said before."""
    if text not in _said:
        _said.add(text)
        say(text)


@contextlib.contextmanager
def kept_stderr() -> Iterator[io.StringIO]:
    """Keep what is written to stderr meanwhile, and of `say_once` also what has been said before."""
    before = _said.copy()
    _said.clear()
    try:
        with contextlib.redirect_stderr(kept := io.StringIO()):
            yield kept
    finally:
        _said.clear()
        _said.update(before)


def agrees(question: str) -> bool:
    """Ask on the terminal; the end of the input is a no."""
    click.echo(f"paceline: {question} [y/N] ", err=True, nl=False)
    line = sys.stdin.readline()
    if not line:
        click.echo(err=True)
    return line.strip().lower() in ("y", "yes")


class ColoursOnly:
    """Filters what ranks write to a terminal: colours pass, other control sequences are shown as escapes (`\\x1b`).

    A terminal obeys what it is sent: it changes its title, the clipboard (OSC 52), the address behind a link (OSC 8)
    and what is on its screen, and answers questions as if the user had typed. Only colours, SGR sequences (ECMA-48,
    8.3.117), are harmless. A sequence, or a character, may be split over several pieces.

    Bytes that are no UTF-8 are escaped, too: some terminals take them for control characters of 8 bits.
    """

    def __init__(self, terminal: TextIO) -> None:
        """Begin without colour."""
        # A terminal of another encoding would take the bytes of other characters for something else.
        self._encoding = "utf-8" if codecs.lookup(terminal.encoding).name == "utf-8" else "ascii"
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._begun = ""  # may become an SGR sequence
        self._is_coloured = False

    def feed(self, data: bytes) -> bytes:
        """What is shown of the next piece, and of what was kept of the last one."""
        text = self._begun + self._decoder.decode(data)
        begun = _BEGUN.search(text)
        self._begun = begun[0] if begun else ""
        return self._shown(text[: begun.start()] if begun else text)

    def end(self) -> bytes:
        """What was kept of the last piece, and the end of a colour; nothing of this source comes directly after it."""
        text = self._begun + self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._begun = ""
        shown = self._shown(text)
        if self._is_coloured:
            self._is_coloured = False
            shown += b"\x1b[0m"
        return shown

    def _shown(self, text: str) -> bytes:
        return _SPECIAL.sub(self._replaced, text).encode(self._encoding, "backslashreplace")

    def _replaced(self, found: re.Match[str]) -> str:
        if found[1] is None:
            return f"\\x{ord(found[0]):02x}"
        self._is_coloured = found[1][2:-1].strip("0;:") != ""
        return found[1]


def has_colours() -> bool:
    """Whether a terminal may get colours."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@contextlib.contextmanager
def ended_by_signals(early: list[int] | None = None) -> Iterator[None]:
    """Turn SIGHUP and SIGTERM into SystemExit, so that what was begun is undone; note early signals for ranks."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    def note(number: int, _: object) -> None:
        assert early is not None
        early.append(number)

    handlers: dict[int, Callable[[int, Any], None]] = {signal.SIGTERM: end, signal.SIGHUP: end}
    if early is not None:
        handlers.update(dict.fromkeys((signal.SIGUSR1, signal.SIGUSR2), note))
    before = {number: signal.getsignal(number) for number in handlers}
    for number, handler in handlers.items():
        if before[number] is not signal.SIG_IGN:  # as nohup does
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, before[number])
