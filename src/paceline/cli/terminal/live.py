"""What a verb shows with `-w`: drawn again and again on a terminal, one block after the other in a pipe."""

from __future__ import annotations

import contextlib
import io
import os
import select
import shutil
import signal
import sys
import termios
import textwrap
import time
from typing import TYPE_CHECKING, Any, NoReturn

import click

from .write import kept_stderr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INTERVAL = 2.0  # seconds between two looks
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the alternate screen, without a cursor


def once_or_live(show: Callable[[], bool], live: bool, title: str) -> None:
    """Call `show` once, or as `watch` does."""
    if live:
        watch(show, title)
    else:
        show()


def watch(show: Callable[[], bool], title: str) -> None:
    """Call `show`, which prints, every two seconds, until it returns False, the user quits, or the reader ends."""
    if sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb"):
        last, notes = _on_terminal(show, title)
        sys.stdout.write(last)  # stays when the alternate screen is gone
        sys.stdout.flush()
        click.echo(notes, err=True, nl=False)
    else:
        _in_pipe(show)


def _in_pipe(show: Callable[[], bool]) -> None:
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)  # reports errors only: the reader has ended
    first = True
    while True:
        began = time.monotonic()
        try:
            if not first:
                click.echo()
            goes_on, first = show(), False
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in the buffer
            return
        if not goes_on or reader.poll(max(0.0, began + INTERVAL - time.monotonic()) * 1000):
            return


def _on_terminal(show: Callable[[], bool], title: str) -> tuple[str, str]:
    """Draw on the alternate screen; returns what is to stay: the last page, if nothing more comes, and its notes."""
    keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    with _screen(keys) as resized:
        while True:
            began = time.monotonic()
            page = _Page()
            with contextlib.redirect_stdout(page), kept_stderr() as notes:  # such as machines that do not answer
                goes_on = show()
            if not goes_on:
                return page.getvalue(), notes.getvalue()
            head = f"{title}  {time.strftime('%H:%M:%S')}  q ends it"
            _draw(head, page.getvalue().splitlines(), notes.getvalue().splitlines())
            while (remaining := began + INTERVAL - time.monotonic()) > 0:
                ready = select.select([resized] + ([] if keys is None else [keys]), [], [], remaining)[0]
                if keys in ready and _is_enough(keys):
                    return "", notes.getvalue()
                if resized in ready:
                    os.read(resized, 4096)
                    break


def _is_enough(keys: int | None) -> bool:
    typed = b"" if keys is None else os.read(keys, 4096)
    return not typed or b"q" in typed.lower() or b"\x03" in typed


def _draw(head: str, lines: list[str], notes: list[str]) -> None:
    """Write over what is there, line by line, so that nothing flickers; lines that do not fit are left out."""
    size = shutil.get_terminal_size()
    wrapped = [part for note in notes for part in textwrap.wrap(note, size.columns)]
    shown = [click.style(head[: size.columns], dim=True), "", *lines]
    room = max(3, size.lines - len(wrapped))
    if len(shown) > room:
        shown = [*shown[: room - 1], f"… {len(shown) - room + 1} more lines"[: size.columns]]
    shown += wrapped[: max(0, size.lines - len(shown))]
    text = "\x1b[K\r\n".join(shown)
    sys.stdout.write(f"\x1b[H{text}\x1b[K\x1b[J")
    sys.stdout.flush()


class _Page(io.StringIO):
    """Text that will be on a terminal."""

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def _screen(keys: int | None) -> Iterator[int]:
    """The alternate screen, put away however this ends; yields a descriptor that is readable after a new size."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    before = {
        number: signal.signal(number, handler)
        for number, handler in (
            (signal.SIGTERM, _leave),
            (signal.SIGHUP, _leave),
            (signal.SIGWINCH, lambda *_: None),
        )
    }
    wakeup = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    modes = None
    try:
        if keys is not None:
            modes = termios.tcgetattr(keys)
            raw = termios.tcgetattr(keys)
            raw[3] &= ~(termios.ICANON | termios.ECHO)
            raw[6][termios.VMIN], raw[6][termios.VTIME] = 1, 0
            raw[6][termios.VSUSP] = b"\0"  # a stopped process would leave its screen to the shell
            termios.tcsetattr(keys, termios.TCSADRAIN, raw)
        sys.stdout.write(_ENTER)
        sys.stdout.flush()
        yield readable
    finally:
        with contextlib.suppress(OSError, termios.error):  # the terminal may be gone
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()
            if keys is not None and modes is not None:
                termios.tcsetattr(keys, termios.TCSADRAIN, modes)
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(readable)
        os.close(writable)


def _leave(number: int, _: Any) -> NoReturn:
    raise SystemExit(128 + number)
