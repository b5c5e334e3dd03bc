"""Text for people: safe on a terminal, and in the number and length that fits."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_QUOTES = "\u2018\u2019\u201a\u201b\u201c\u201d\u201e\u201f"
_MOST_NAMES = 4
_DASHES = ("\u2010", "\u2011", "\u2012", "\u2013", "\u2014", "\u2015", "\u2212")


def printable(text: str) -> str:
    """The text on one line, with control characters escaped as in a Python string (`\\x1b`)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def pasted(words: Iterable[str]) -> str | None:
    """What to say of the first word with quotation marks or dashes of a printed text; None if none has them.

    Web pages and chats turn those of a command line into these, which no shell and no program knows.
    """
    for word in words:
        name, has_value, value = word.partition("=")
        shown, value = (f"{name}=…", value) if has_value else (word, word)  # a value may be a secret
        if word[:1] in _DASHES:
            return f"{shown} begins with the dash {word[0]} of a printed text; type - or --"
        if mark := next((it for it in (value[:1], word[:1], word[-1:]) if it and it in _QUOTES), ""):
            return f"{shown} has the quotation mark {mark} of a printed text; type ' or \""
    return None


def counted(number: int, thing: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def a_few(names: Sequence[str]) -> str:
    """`a`, `a, b, c, d`, `a, b, c and 2 others`."""
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _MOST_NAMES - 1])} and {len(names) - _MOST_NAMES + 1} others"


def pattern(text: str, called: str) -> re.Pattern[bytes]:
    """A regular expression for the lines of logs, which messages name as `called`.

    Raises:
        UserError: it is none.
    """
    try:
        return re.compile(text.encode(errors="surrogateescape"))
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f"{called} is not a regular expression: {error}; put \\ before special letters") from None
