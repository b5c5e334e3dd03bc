"""What is looked at again and again beside other things: by a thread of its own, for which nobody waits at the end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Repeated:
    """Calls a function again and again, until it says that this was the last time.

    Attributes:
        is_over: whether it was stopped.
    """

    def __init__(self, do: Callable[[], float | None], after: float = 0.0) -> None:
        """Begin after so many seconds. `do` returns how many pass until the next time; None if there is none."""
        self._do, self._wake, self.is_over = do, threading.Event(), False
        self._thread = threading.Thread(target=self._work, args=(after,), daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Call the function now; once more if it is being called."""
        self._wake.set()

    def stop(self) -> None:
        """Call it no more; it may be called at the moment."""
        self.is_over = True
        self.wake()

    def join(self) -> None:
        """Wait until it is not called any more."""
        self._thread.join()

    def _work(self, after: float) -> None:
        pause: float | None = after
        while pause is not None:
            self._wake.wait(min(pause, threading.TIMEOUT_MAX))
            self._wake.clear()
            pause = None if self.is_over else self._do()
