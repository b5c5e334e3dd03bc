"""A verb that is ended from outside, and has something to undo."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def ended_by_signals(early: list[int] | None = None) -> Iterator[None]:
    """Turn SIGHUP and SIGTERM into SystemExit, so that what was begun is undone."""

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
