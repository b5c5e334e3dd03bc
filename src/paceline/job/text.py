"""Text that may be shown on a terminal, whoever wrote it."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text on one line and without what a terminal would obey: other characters as in a Python string (`\\x1b`)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
