"""Makes text safe to show on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text on one line, with control characters escaped as in a Python string (`\\x1b`)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
