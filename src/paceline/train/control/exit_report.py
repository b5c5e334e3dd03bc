"""Records how a rank ends, for the process that started it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from paceline.contract import ERROR_FILE, RESUME_CODE, WANTS_INTERRUPT

from .errors import CollectiveMismatch, LeftEarly, ReplicaMismatch


class Preempted(SystemExit):
    """The run was asked to stop and has saved its state. The exit code asks the launcher to resume it."""

    __module__ = "paceline"  # where users find it

    def __init__(self) -> None:
        super().__init__(RESUME_CODE)


def record(kind: str, message: str, **more: Any) -> None:
    """Record how this rank ends, if the launcher asks for that; the file is as `node.ranks.program` writes it."""
    path = os.environ.get(ERROR_FILE)
    if path is None or os.path.exists(path):
        return  # the launcher does not ask, or an exception was recorded before
    what = {"type": kind, "message": message, "traceback": "", "log_start": None, "log_end": None, **more}
    with contextlib.suppress(OSError):
        with open(f"{path}.new", "w") as file:
            json.dump({**what, "time": time.monotonic(), "pid": os.getpid()}, file)
        os.replace(f"{path}.new", path)


def print_and_record(kind: str, message: str, text: str) -> None:
    """Write `text` to stderr, and record it with its offsets in the log."""
    start = end = None
    with contextlib.suppress(OSError):
        start = os.fstat(2).st_size
        os.write(2, text.encode(errors="replace"))
        end = os.fstat(2).st_size
    record(kind, message, traceback=text, log_start=start, log_end=end)


def has_failed() -> bool:
    """Whether an uncaught exception ends this process."""
    return getattr(sys, "last_value", None) is not None


def fail_at_exit(error: BaseException) -> None:
    """Let this process, which calls its `atexit` functions, print an error and end with exit code 1.

    Python has decided on its exit code already. So C's `exit` is asked to end the process with another one, after
    Python has closed what is open. A rank of `paceline run` ends with that code if an error was recorded.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    print_and_record(type(error).__name__, str(error), "".join(traceback.format_exception(error)))
    libc = ctypes.CDLL(None)
    for function, argument in ((libc._exit, 1), (libc.fflush, None)):  # the last one is called first
        libc.__cxa_atexit(ctypes.cast(function, ctypes.c_void_p), ctypes.c_void_p(argument), None)


def ask_for_interrupt() -> None:
    """Ask the launcher to send this rank SIGINT instead of SIGTERM when the job is stopped by Ctrl-C."""
    path = os.environ.get(ERROR_FILE)
    if path is not None:
        with contextlib.suppress(OSError):
            Path(path).with_suffix(WANTS_INTERRUPT).touch()


# -- the error that ends a rank ----------------------------------------------------------------------------------------
# The error that ends a rank: raised in its main thread, or, if that is stuck, printed before the process ends.


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
