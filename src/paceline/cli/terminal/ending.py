"""A verb that is ended from outside, and has something to undo."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn SIGHUP and SIGTERM into SystemExit, so that what was begun is undone."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup does
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is end:
                signal.signal(number, handler)
