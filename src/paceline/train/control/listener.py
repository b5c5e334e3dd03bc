"""The thread of a rank that receives what other ranks send, and signals, while the main thread is in a collective."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Protocol

from paceline.contract.handshake import HandshakeError

from .star import WAKEUP

if TYPE_CHECKING:
    from .relay import Message
    from .star import Star


class Events(Protocol):
    """What the thread reports; it calls these methods itself."""

    def received(self, rank: int, message: Message) -> None:
        """A message came from a rank."""

    def disconnected(self, rank: int, why: str) -> None:
        """The connection to a rank has ended, or can no longer be trusted."""

    def signalled(self, number: int) -> None:
        """This process got a signal."""

    def next_deadline(self) -> float | None:
        """When `deadline_passed` is to be called, on `time.monotonic`'s clock."""

    def deadline_passed(self) -> None:
        """The time of `next_deadline` has come."""


class Listener:
    """Reads what other ranks send until it is stopped."""

    def __init__(self, events: Events, star: Star) -> None:
        self._events, self._star = events, star
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="paceline-watch", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; must not be called with a lock that its events take."""
        self._is_stopped = True
        self._star.wake()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_stopped:
            deadline = self._events.next_deadline()
            ready = self._star.select(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready and not self._is_stopped:
                self._events.deadline_passed()
            for rank, what in self._star.take(ready):
                if isinstance(what, OSError):
                    is_forged = isinstance(what, HandshakeError)
                    self._events.disconnected(
                        rank, "what came from it was changed on the way" if is_forged else "it is gone"
                    )
                elif rank != WAKEUP:
                    self._events.received(rank, json.loads(what))
                else:
                    for number in filter(None, what):  # 0 only wakes
                        self._events.signalled(number)
