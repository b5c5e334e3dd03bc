"""Errors that a user can correct."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


_MOST = 50  # names that one line lists


class UserError(Exception):
    """Bad input: one line that says what is wrong, where, and what to do. The command line exits with code 2.

    If several hosts have a problem, there is one line for each.
    """

    __module__ = "paceline.jobs"  # where users find it


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint with the known word that is closest to a misspelt one, or with all known words if none is close."""
    import difflib  # not needed where all is well

    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    if close:
        return f"did you mean {close[0]}?"
    more = f" … ({len(names) - _MOST} more)" if len(names) > _MOST else ""
    return f"choose one of {', '.join(names[:_MOST])}{more}"
