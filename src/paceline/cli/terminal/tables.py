"""What list-like verbs print: `-o table|wide|json|yaml`."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
import textwrap
import unicodedata
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TextIO, TypeVar

import click

from paceline.job.text import printable

from .write import has_colours

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Row = TypeVar("Row")

GAP = "  "
_LEAST = 8  # columns of the terminal that a shortened cell keeps, unless its column needs more
_MORE = "  …"  # in the heading, where columns are left out
_WORD = 64  # columns of the longest name that is never broken
_BELOW = "    "  # before text that stands below its row
STATE_COLOURS = {
    "PENDING": "yellow",
    "STARTING": "cyan",
    "RUNNING": "green",
    "RESTARTING": "yellow",
    "SUSPENDED": "magenta",
    "SUCCEEDED": "blue",
    "FAILED": "red",
    "STOPPED": "magenta",
    "LOST": "red",
}


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table."""

    title: str
    text: Callable[[Row], str | None]  # what it shows of a row; None shows as `-`
    wide: bool = False  # only in a wide table
    # text, which a narrow terminal shows only the beginning of; names and numbers it shows whole, or not
    is_text: bool = False
    # text that is never cut: on a narrow terminal it goes on in further lines, or stands below its row where there is
    # no room for its column. Its words are names, which are not broken, unless it `is_text`.
    wraps: bool = False
    is_optional: bool = False  # only in a table where some row has it
    least: int = _LEAST  # columns of the terminal that its text needs to be worth reading; a name needs its own length
    keep: int = 0  # a narrow terminal has columns with a higher one first, and of equal ones the left
    colours: Mapping[str, str] = field(default_factory=dict)  # text → the colour that it has on a terminal


def if_known(shown: Callable[[Row], str], value: Row | None) -> str | None:
    """The text of a cell, if there is a value."""
    return None if value is None else shown(value)


def show(
    rows: Sequence[Row], columns: Sequence[Column[Row]], output: str, to_dict: Callable[[Row], Mapping[str, object]]
) -> None:
    """Print rows as a table, see `table`, or as the list of what `to_dict` makes of them."""
    if output in ("json", "yaml"):
        show_data([to_dict(row) for row in rows], output)
        return
    click.echo("\n".join(table(rows, columns, output, sys.stdout)))


def show_newest(
    rows: Sequence[Row],
    columns: Sequence[Column[Row]],
    output: str,
    to_dict: Callable[[Row], Mapping[str, object]],
    *,
    watch: bool,
) -> None:
    """`show` jobs, which come the newest first: on a terminal that is too low for all, the newest last."""
    is_low = output in ("table", "wide") and sys.stdout.isatty() and not watch
    is_low = is_low and len(table(rows, columns, output, sys.stdout)) + 1 > shutil.get_terminal_size().lines
    if not is_low:
        show(rows, columns, output, to_dict)
        return
    show(rows[::-1], columns, output, to_dict)
    click.echo(f"paceline: {len(rows)} jobs, the newest last", err=True)


def table(rows: Sequence[Row], columns: Sequence[Column[Row]], output: str, stream: TextIO) -> list[str]:
    """The lines of a table for a stream: the heading, and one for each row.

    It has its heading also in a pipe; on a terminal it has colours, unless NO_COLOR is set, and fits the terminal's
    width: text is cut, then columns are left out, which the heading shows by `…`. Nothing in a row can command the
    terminal: control characters are shown as escapes.
    """
    chosen = [column for column in columns if output == "wide" or not column.wide]
    terminal = stream.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    return _table(rows, chosen, width, terminal and has_colours())


def bold(text: str) -> str:
    """A title; click.echo drops what makes it bold in a pipe."""
    return click.style(text, bold=True)


def show_data(data: Any, output: str) -> None:
    """Print what JSON can hold as `json` or `yaml`, in ASCII."""
    text = json.dumps(data, indent=None if output == "yaml" else 2)
    if output == "yaml":
        import yaml

        # The fast one refuses bytes that are no UTF-8, which this one escapes.
        dumper = yaml.SafeDumper if re.search(r"\\ud[c-f]", text) else getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        text = yaml.dump(json.loads(text), Dumper=dumper, sort_keys=False).rstrip("\n")  # read back: without aliases
    click.echo(text)


def _table(rows: Sequence[Row], columns: Sequence[Column[Row]], width: int | None, colour: bool) -> list[str]:
    """The lines of a table, the heading first. Works by column: that is several times faster than by cell."""
    found = [(column, list(map(column.text, rows))) for column in columns]
    found = [(it, texts) for it, texts in found if not it.is_optional or any(text is not None for text in texts)]
    columns, cells = [it for it, _ in found], [_clean([it.title, *texts]) for it, texts in found]
    widths = [max(map(len if "".join(texts).isascii() else display_width, texts)) for texts in cells]
    longest = [_longest(texts) if it.wraps and not it.is_text else 0 for it, texts in zip(columns, cells, strict=True)]
    rooms = dict(enumerate(widths)) if width is None else _fit(widths, longest, columns, width)
    last = max(rooms, default=0)
    below = [i for i, column in enumerate(columns) if column.wraps and i not in rooms]
    is_cut = len(rooms) + len(below) < len(columns) and sum(rooms.values()) + len(GAP) * (len(rooms) - 1) + len(
        _MORE
    ) <= (width or 0)
    drawn, more = [], _wrap(cells, rooms, below, [i for i in rooms if columns[i].wraps and rooms[i] < widths[i]], width)
    for i, room in rooms.items():
        column, texts, fill = columns[i], cells[i], i < last
        if room < widths[i] or column.colours or not "".join(texts).isascii():
            shown = {text: _cell(text, room, fill) for text in set(texts)}
            if colour:
                shown.update({t: click.style(shown[t], fg=c) for t, c in column.colours.items() if t in shown})
            texts = [shown[text] for text in texts]
        elif fill:
            texts = [text.ljust(room) for text in texts]
        drawn.append(texts)
    lines = list(map(GAP.join, zip(*drawn, strict=True)))
    if is_cut:
        lines[0] = f"{lines[0]}{' ' * (rooms[last] - display_width(cells[last][0]))}{_MORE}"
    if colour:
        lines[0] = click.style(lines[0], bold=True)
        more[0] = [click.style(line, bold=True) for line in more[0]]
    return [line for first, others in zip(lines, more, strict=True) for line in (first, *others)]


def _wrap(
    cells: list[list[str]], rooms: Mapping[int, int], below: Sequence[int], within: Sequence[int], width: int | None
) -> list[list[str]]:
    """The lines under the first one of each row. Of the cells in columns `within`, only the first lines are left."""
    more: list[list[str]] = [[] for _ in (cells[0] if cells else ())]
    for row in range(len(more) if within or below else 0):
        parts = {i: _wrapped(cells[i][row], rooms[i]) for i in within}
        for n in range(1, max(map(len, parts.values()), default=1)):
            texts = [parts[i][n] if n < len(parts.get(i, ())) else "" for i in rooms]
            more[row].append(GAP.join(map(_cell, texts, rooms.values(), itertools.repeat(True))).rstrip())
        for text in (cells[i][row] for i in below if cells[i][row] not in ("-", "")):
            more[row] += [_BELOW + line for line in _wrapped(text, max(1, (width or 0) - len(_BELOW)))]
        for i in within:
            cells[i][row] = parts[i][0]
    return more


def _longest(texts: list[str]) -> int:
    """The width of the longest word in them that is to be whole."""
    return min(_WORD, max((display_width(word) for text in texts for word in text.split()), default=0))


def _wrapped(text: str, room: int) -> list[str]:
    """Text in lines of a width; only a word that no line holds is broken."""
    is_wide = display_width(text) > len(text)  # it has characters that take two columns
    return textwrap.wrap(text, max(1, room // 2) if is_wide else room, break_on_hyphens=False) or [""]


def _clean(texts: list[str | None]) -> list[str]:
    """All that can be printed as it is, in most cases after one look at the whole column."""
    filled = ["-" if text is None else text for text in texts]
    return filled if "".join(filled).isprintable() else [printable(text) for text in filled]


def _fit(widths: list[int], longest: list[int], columns: Sequence[Column[Row]], width: int) -> dict[int, int]:
    """Column → width, of those that fit: text gets less room first, then columns are left out, then the first is cut.

    A wide table has all columns that it would have if it was not. `longest` has the width of the longest name of each
    column that wraps, and 0 of others.
    """
    least = {
        i: min(widths[i], max(it.least, longest[i])) if it.is_text or it.wraps else widths[i]
        for i, it in enumerate(columns)
    }

    def excess(chosen: dict[int, int], more: bool) -> int:
        return sum(chosen.values()) + len(GAP) * (len(chosen) - 1) + (len(_MORE) if more else 0) - width

    is_cut = excess(least, False) > 0
    usual = {i: room for i, room in least.items() if not columns[i].wide}
    fits = excess(usual, False) <= 0
    chosen = least if not is_cut else usual if fits else {0: least[0]}
    full = None  # the last `keep` of which there is no room for all
    for i in sorted({*least} - {*chosen}, key=lambda i: (columns[i].wide, -columns[i].keep)):
        if columns[i].keep != full and excess({**chosen, i: least[i]}, True) <= 0:
            chosen[i] = least[i]
        else:
            full = columns[i].keep
    fitted = {i: widths[i] for i in sorted(chosen)}
    is_cut = is_cut and not (fits and excess(chosen, True) > 0)
    while (over := excess(fitted, is_cut)) > 0 and (among := [i for i in fitted if fitted[i] > least[i]]):
        widest = max(among, key=fitted.__getitem__)
        others = max((fitted[i] for i in among if i != widest), default=0)
        fitted[widest] = max(least[widest], fitted[widest] - over, min(others, fitted[widest] - 1))
    if over > 0:
        fitted[0] = max(1, fitted[0] - over)
    return fitted


def _cell(text: str, room: int, fill: bool) -> str:
    """Text cut to a width, and filled up to it."""
    taken = display_width(text)
    if taken > room:
        taken = end = room - 1 if text.isascii() else 0
        while taken + (step := display_width(text[end])) < room:
            taken += step
            end += 1
        end = max(text.rfind(" ", end // 2, end + 1), 0) or end  # no half of a name, if that costs less than half of it
        text = f"{text[:end]}…"
        taken = display_width(text)
    return text + " " * (room - taken) if fill else text


def display_width(text: str) -> int:
    """How many columns of a terminal the text takes: two for a wide East Asian character, none for an accent."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.category(c) in ("Mn", "Me") else 2 if unicodedata.east_asian_width(c) in ("W", "F") else 1
        for c in text
    )
