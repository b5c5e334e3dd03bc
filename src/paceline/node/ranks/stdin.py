"""Explains errors of a rank that reads its standard input, which is empty."""

from __future__ import annotations

import os
import sys
from typing import Any


def explain_breakpoints() -> None:
    """Make `breakpoint()` raise an error that says what to do, if its debugger could not read anything."""
    original = sys.breakpointhook

    def hook(*args: Any, **kwargs: Any) -> Any:
        if _asks() and _is_empty():
            raise RuntimeError(f"breakpoint(): {_what_to_do()}, or skip all with PYTHONBREAKPOINT=0")
        return original(*args, **kwargs)

    if _asks() and _is_empty():  # otherwise, the debugger must be called directly by the script
        sys.breakpointhook = hook


def _asks() -> bool:
    """Whether `breakpoint()` would start a debugger that reads standard input."""
    return os.environ.get("PYTHONBREAKPOINT") in (None, "", "pdb.set_trace")


def explanation(error: BaseException) -> str:
    """What to do about an exception that empty standard input has caused; "" for other exceptions."""
    asked = type(error).__name__ == "BdbQuit" or (isinstance(error, EOFError) and "reading a line" in str(error))
    return _what_to_do() if asked and _is_empty() else ""


def _is_empty() -> bool:
    try:
        return os.path.samestat(os.fstat(0), os.stat(os.devnull))
    except OSError:  # the script has closed it
        return False


def _what_to_do() -> str:
    rank, job = os.environ.get("PACELINE_LOCAL_RANK", "0"), os.path.basename(os.environ.get("PACELINE_RUN_DIR", "JOB"))
    return (
        "standard input of a rank is empty; give it yours with `paceline run --stdin "
        f"{rank}`, or open a shell in the environment of the rank with `paceline attach {job}`"
    )
