"""How a rank ends, for whoever started it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from paceline.contract import ERROR_FILE, RESUME_CODE, WANTS_INTERRUPT


class Preempted(SystemExit):
    """The run was told to stop; its state is saved, and the exit code asks whoever started it to resume it."""

    __module__ = "paceline"  # where users find it

    def __init__(self) -> None:
        super().__init__(RESUME_CODE)


def record(kind: str, message: str, **more: Any) -> None:
    """Tell whoever started this rank how it ends, where they asked for that; the file is as `node.rank` writes it."""
    path = os.environ.get(ERROR_FILE)
    if path is None or os.path.exists(path):
        return  # nobody asked, or an exception was there before
    what = {"type": kind, "message": message, "traceback": "", "log_start": None, "log_end": None, **more}
    with contextlib.suppress(OSError):
        with open(f"{path}.new", "w") as file:
            json.dump({**what, "time": time.monotonic(), "pid": os.getpid()}, file)
        os.replace(f"{path}.new", path)


def last_words(kind: str, message: str, text: str) -> None:
    """Write `text` to stderr, and record it with its place in the log."""
    start = end = None
    with contextlib.suppress(OSError):
        start = os.fstat(2).st_size
        os.write(2, text.encode(errors="replace"))
        end = os.fstat(2).st_size
    record(kind, message, traceback=text, log_start=start, log_end=end)


def ask_for_interrupt() -> None:
    """Ask whoever started this rank for SIGINT instead of SIGTERM when the job is stopped by Ctrl-C."""
    path = os.environ.get(ERROR_FILE)
    if path is not None:
        with contextlib.suppress(OSError):
            Path(path).with_suffix(WANTS_INTERRUPT).touch()
