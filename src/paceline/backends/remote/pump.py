"""The answers on many connections, read by one thread as they come."""

from __future__ import annotations

import os
import selectors
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .connection import Answers

    Take = Callable[[Answers], bool]


class Pump:
    """Tells of each connection when there is something to read: a function, which returns whether to go on with it.

    The function reads all that is there with `Answers.arrived`. One that waits holds up all other connections.
    """

    def __init__(self) -> None:
        self._selector: selectors.BaseSelector | None = None
        self._wake = -1
        self._new: list[tuple[Answers, Take]] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def add(self, answers: Answers, take: Take) -> None:
        """Read another connection from now on."""
        with self._lock:
            if self._is_closed:
                return
            self._new.append((answers, take))
            if self._selector is None:
                self._selector = selectors.DefaultSelector()
                reader, self._wake = os.pipe()
                self._selector.register(reader, selectors.EVENT_READ)
                threading.Thread(target=self._run, args=(self._selector, reader), daemon=True).start()
            os.write(self._wake, b"+")

    def close(self) -> None:
        """Read no more."""
        with self._lock:
            self._is_closed = True
            if self._wake != -1:
                os.close(self._wake)
                self._wake = -1

    def _run(self, selector: selectors.BaseSelector, reader: int) -> None:
        with selector:
            while True:
                for key, _ in selector.select():
                    if key.fd != reader:
                        answers, take = key.data
                        if not take(answers):
                            selector.unregister(key.fd)
                    elif not os.read(reader, 4096):
                        os.close(reader)
                        return
                with self._lock:
                    new, self._new = self._new, []
                for answers, take in new:
                    if take(answers):  # what has come before it was registered
                        selector.register(answers.fileno(), selectors.EVENT_READ, (answers, take))
