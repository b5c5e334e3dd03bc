"""What a shell does with a line: commands one after the other, redirections, expansions.

`$NAME`, `$(command)`, `~` and `*` mean something only to the shell. In the words of a line they are kept apart from the
same characters in quotes, so that a line that is printed again means the same.
"""

from __future__ import annotations

import os
import re
import shlex
import string
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_BARE, _QUOTED = 0xF0000, 0x100000  # planes for private use: characters that the shell expands, outside and in quotes
_NAME = re.compile(r"\$(?:\w+|[@*#?!$-])")
_WORDS = re.compile(r"\$@|\$\{(@|\w+\[@\])\}")  # in quotes, too, each word of it is one
_ACTIVE = re.compile("[\U000f0000-\U0010ffff]")
_RUN = re.compile("[\U000f0000-\U0010ffff]+")
_VALUE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_LETTERS = f"{string.ascii_letters}{string.digits}_"
_DOCUMENT = re.compile(r"(?<!<)<<-?[ \t]*(['\"]?)(\w+)\1(?!<)")
_ARRAY = re.compile(r"(?:^|\s)[A-Za-z_]\w*\+?=$")
_BEHIND_NAME = re.compile(r"(?:^|\s)[A-Za-z_]\w*\+?=\S*$")
_END = re.compile(r"&&|;;|\|\||\|&|[|;\n()]|&(?!>)")
ASSIGNED = re.compile(r"([A-Za-z_]\w*\+?)=(.*)", re.DOTALL)


class Command(NamedTuple):
    """One command of a line.

    Attributes:
        words: its text, in which what the shell expands is marked.
        redirected: its redirections, as they were typed.
        end: what stands behind it: `&&`, `|`, `;`, `&`, a parenthesis, a newline, or nothing.
    """

    words: str
    redirected: str
    end: str


def variable(name: str) -> str:
    """A word that the shell replaces by the value of a variable."""
    return _mark(f"${name}", _QUOTED)


def commands(text: str) -> list[Command]:
    """The commands of a line, or of several lines; a comment, or a here-document, stays as it is."""
    text = text.replace("\r\n", "\n")  # as Windows writes it
    found: list[Command] = []
    words, redirected, quote, place = "", "", "", 0
    while place < len(text):
        here, size = text[place], 1
        taken = here
        if quote == "'" or (not quote and here == "'"):
            quote = "" if quote and here == "'" else "'"
        elif here == "\\":
            size = 2
            taken = text[place : place + 2].replace("\\\n", "")
            taken = taken[1:] if taken == "\\" or (quote and taken in ("\\$", "\\`")) else taken
        elif here == '"':
            quote = "" if quote else '"'
        elif (size := _expanded(text, place, "" if quote else words)) or (not quote and here in "*?[]{}~"):
            size = size or 1
            taken = _mark(text[place : place + size], _QUOTED if quote else _BARE)
        elif quote:
            size = 1
        elif here == "#" and (not words or words[-1].isspace()):
            size, taken = len(text[place:].partition("\n")[0]), ""
            if not words.strip():
                found.append(Command(text[place : place + size], "", ""))
        elif size := _document(text, place):
            found.append(Command(words.strip(), redirected + text[place : place + size], ""))
            words = redirected = taken = ""
        elif (end := _END.match(text, place)) is not None and (here != "&" or text[place - 1] not in "<>"):
            found.append(Command(words.strip(), redirected.strip(), end[0]))
            words = redirected = taken = ""
            size = len(end[0])
        else:
            size = 1
            if not redirected and (here in "<>" or text[place : place + 2] == "&>"):
                number = re.search(r"(?<=\s)\d$", words)
                redirected = "" if number is None else number[0]
                words = words if number is None else words[:-1]
                redirected += here
                taken = ""
        words += "" if redirected else taken
        redirected += text[place : place + size] if redirected and taken else ""
        place += size
    found.append(Command(words.strip(), redirected.strip(), ""))
    return [it for it in found if it != Command("", "", "")]


def _document(text: str, place: int) -> int:
    """The length of a here-document whose `<<` is at a place; 0 if none is there."""
    begin = _DOCUMENT.match(text, place)
    if begin is None:
        return 0
    end = re.compile(rf"^\t*{begin[2]}$", re.MULTILINE).search(text, begin.end())
    return (len(text) if end is None else end.end()) - place


def _expanded(text: str, place: int, before: str) -> int:
    """How many characters from a place on the shell replaces by a value, or takes for the values of an array."""
    if text[place] == "(" and _ARRAY.search(before):
        return _closed(text, place)
    if text[place] == "`":
        return text.find("`", place + 1) + 1 - place if "`" in text[place + 1 :] else 0
    if text[place] != "$":
        return 0
    if text[place + 1 : place + 2] in ("(", "{"):
        length = _closed(text, place + 1)
        return length and length + 1
    name = _NAME.match(text, place)
    return 0 if name is None else name.end() - place


def _closed(text: str, place: int) -> int:
    """How many characters from a bracket on it takes to close it; 0 if it is not closed."""
    opening, closing, depth = text[place], {"(": ")", "{": "}"}[text[place]], 0
    for number, here in enumerate(text[place:]):
        depth += (here == opening) - (here == closing)
        if not depth:
            return number + 1
    return 0


def _mark(text: str, plane: int) -> str:
    return "".join(chr(plane + ord(it)) if ord(it) < 0xFFFE else it for it in text)


def is_expanded(word: str) -> bool:
    """Whether the shell replaces a part of a word."""
    return _ACTIVE.search(word) is not None


def is_variable(word: str) -> bool:
    """Whether all of a word is replaced, and by as many words as the value has."""
    is_bare = bool(word) and all(_kind(it) == _BARE for it in word)
    return is_bare or (is_expanded(word) and _WORDS.fullmatch(plain(word)) is not None)


def bare(text: str) -> str:
    """A text as if what the shell expands in it were not in quotes: what `sh -c "TEXT"` makes of it."""
    return _ACTIVE.sub(lambda it: chr((ord(it[0]) - _BARE) % 0x10000 + _BARE), text)


def has_bare(word: str) -> bool:
    """Whether the shell replaces a part of a word that is not in quotes."""
    return any(_kind(it) == _BARE for it in word)


def filled(text: str, values: Mapping[str, str]) -> str:
    """A text in which the shell need not replace variables whose values are known."""

    def fill(match: re.Match[str]) -> str:
        names = [it[1] or it[2] for it in _VALUE.finditer(plain(match[0]))]
        is_known = _VALUE.sub("", plain(match[0])) == "" and all(name in values for name in names)
        said = "".join(values[name] for name in names) if is_known else match[0]
        if re.search(r"\s", said) and has_bare(match[0]):  # the shell makes words of it, but not behind NAME=
            return match[0] if _BEHIND_NAME.search(text, 0, match.start()) else re.sub(r"\s", " ", said)
        return said

    return _RUN.sub(fill, text)


def given_to_shell(words: Sequence[str]) -> str | None:
    """TEXT of `sh -c TEXT`; None for other commands."""
    if not words or os.path.basename(words[0]) not in ("sh", "bash"):
        return None
    return next((text for flag, text in pairwise(words) if re.fullmatch(r"-\w*c", flag)), None)


def plain(text: str) -> str:
    """A text without marks, for people."""
    return _ACTIVE.sub(lambda it: chr((ord(it[0]) - _BARE) & 0xFFFF), text)


def quoted(word: str, *, is_first: bool = False) -> str:
    """A word as it is typed: what the shell expands is not quoted against it, all else is."""
    if not is_expanded(word):
        name = ASSIGNED.fullmatch(word)
        return shlex.quote(word) if name is None or not is_first else f"{name[1]}={shlex.quote(name[2])}"
    said = ""
    for kind, letters in groupby(word, _kind):
        part = "".join(letters)
        if kind == _BARE:
            said += plain(part)
        elif kind == _QUOTED:
            said += f'"{plain(part)}"'
        else:
            is_glued = said[-1:].isalnum() and part[0] in _LETTERS and "'" not in part  # $NAME'_2'
            said += f"'{part}'" if is_glued else shlex.quote(part)
    return said


def _kind(letter: str) -> int:
    return _QUOTED if ord(letter) >= _QUOTED else _BARE if ord(letter) >= _BARE else 0
