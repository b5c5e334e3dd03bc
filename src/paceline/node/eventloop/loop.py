"""The agent's event loop: sockets, signals and deadlines, in one thread."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import signal
import time
from typing import TYPE_CHECKING, Any

from .channel import Channel, ChannelClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


_LONGEST = 86400.0  # seconds; the kernel counts milliseconds in 31 bits


class Loop:
    """Calls back when something happens. The agent waits in `run_until` and nowhere else, and has no other clock.

    Attributes:
        unread_since: what is read now has arrived after this time; long ago, if this process was stopped meanwhile.
    """

    unread_since = _waits_since = 0.0

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._signals_read, self._signals_write = os.pipe()
        os.set_blocking(self._signals_read, False)
        os.set_blocking(self._signals_write, False)
        self._on_signal: Callable[[int], None] = lambda _: None
        self._timers: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._numbers = itertools.count()
        self.watch(self._signals_read, self._read_signals)

    def close(self) -> None:
        """Close what it waits with; signals must be caught by another one, or by none."""
        self._selector.close()
        os.close(self._signals_read)
        os.close(self._signals_write)

    def now(self) -> float:
        """Seconds on the monotonic clock."""
        return time.monotonic()

    def watch(self, source: Any, callback: Callable[[], None]) -> None:
        """Call `callback` whenever `source` (a descriptor, socket or `Channel`) is readable."""
        self._selector.register(source, selectors.EVENT_READ, callback)

    def forget(self, source: Any) -> None:
        """Stop watching `source`, if it is watched."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def catch(self, signals: Collection[int], callback: Callable[[int], None]) -> None:
        """Call `callback` with the number of each of these signals that arrives, outside of any signal handler."""
        self._on_signal = callback
        for number in signals:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._signals_write, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)  # the parent process may have blocked them

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call `callback` once, so many seconds from now."""
        heapq.heappush(self._timers, (self.now() + seconds, next(self._numbers), callback))

    def run_until(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Handle events until `condition()` holds or `timeout` seconds are over; returns whether it holds."""
        deadline = None if timeout is None else self.now() + timeout
        while (holds := self._turn(condition, deadline)) is None:
            pass
        return holds

    def _turn(self, condition: Callable[[], bool], deadline: float | None) -> bool | None:
        """Handle what has happened, or wait for it once; returns whether the condition holds, None to go on."""
        if condition():
            return True
        now = self.now()
        is_over = deadline is not None and deadline <= now
        if not is_over and self._call_due(now):
            return None
        times = [when for when, *_ in self._timers[:1]] + ([] if deadline is None else [deadline])
        self.unread_since, self._waits_since = self._waits_since, now
        self._wait(0.0 if is_over else max(0.0, min(times) - now) if times else None)
        return condition() if is_over else None  # also what came while this process was suspended has been read

    def _call_due(self, now: float) -> bool:
        due = []
        while self._timers and self._timers[0][0] <= now:
            due.append(heapq.heappop(self._timers)[2])
        for callback in due:
            callback()
        return bool(due)

    def _wait(self, timeout: float | None) -> None:
        """Wait for sockets and signals, and handle them."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, Channel):
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if key.fileobj.wants_write else 0)
                if key.events != wanted:
                    self._selector.modify(key.fileobj, wanted, key.data)
        for key, events in self._selector.select(None if timeout is None else min(timeout, _LONGEST)):
            if events & selectors.EVENT_WRITE:
                with contextlib.suppress(ChannelClosed):  # the next `receive` raises it too
                    key.fileobj.flush()  # type: ignore[union-attr]
            if events & selectors.EVENT_READ and key.fd in self._selector.get_map():
                key.data()

    def _read_signals(self) -> None:
        for number in sorted(
            os.read(self._signals_read, 256)
        ):  # of several at once, the handler of the last one runs first
            self._on_signal(number)
