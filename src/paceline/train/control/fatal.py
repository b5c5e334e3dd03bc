"""The error that ends a rank: raised in its main thread, or, if that is stuck, printed before the process ends."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback

from .errors import CollectiveMismatch, LeftEarly, ReplicaMismatch
from .exit_report import print_and_record


class Fatal:
    """The first error that ends this rank, if there is one. The caller holds a lock.

    Attributes:
        error: the error.
        deadline: when the process ends, on `time.monotonic`'s clock; None once the main thread has the error.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.deadline: float | None = None

    def set(self, error: Exception, grace: float) -> bool:
        """Set the error, unless there is one; returns whether it was set."""
        if self.error is not None:
            return False
        self.error, self.deadline = error, time.monotonic() + grace
        return True

    def explain(self, error: Exception, grace: float) -> bool:
        """The same for an error that says why a rank has left early: it replaces that."""
        if isinstance(self.error, LeftEarly):
            self.error = None
        return self.set(error, grace)

    def handed_over(self) -> None:
        """The main thread raises the error, so it is not stuck."""
        self.deadline = None

    def end_process(self) -> None:
        """Print the error, and where the main thread is, and end the process."""
        error = self.error
        assert error is not None
        text = f"{type(error).__module__}.{type(error).__qualname__}: {error}\n"
        if isinstance(error, (LeftEarly, CollectiveMismatch, ReplicaMismatch)):
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame else ""
            text = f"Traceback (most recent call last):\n{stack}{text}"
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        print_and_record(type(error).__name__, str(error), text)
        os._exit(1)
