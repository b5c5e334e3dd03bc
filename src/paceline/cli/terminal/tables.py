"""What list-like verbs print: `-o table|wide|json|yaml`."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import unicodedata
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TextIO, TypeVar

import click

from paceline.cli.flags.options import Option
from paceline.job.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Row = TypeVar("Row")

GAP = "  "
_LEAST = 8  # columns of the terminal that a shortened cell keeps, unless its column needs more
_MORE = "  …"  # in the heading, where columns are left out
STATE_COLOURS = {
    "PENDING": "yellow",
    "STARTING": "cyan",
    "RUNNING": "green",
    "RESTARTING": "yellow",
    "SUCCEEDED": "blue",
    "FAILED": "red",
    "STOPPED": "magenta",
    "LOST": "red",
}


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table.

    Attributes:
        text: what it shows of a row; None shows as `-`.
        wide: only in a wide table.
        is_text: text, which a narrow terminal shows only the beginning of; names and numbers it shows whole, or not.
        wraps: text, the last column, whose end a narrow terminal shows in further lines.
        is_optional: only in a table where some row has it.
        least: columns of the terminal that its text needs to be worth reading.
        keep: a narrow terminal has columns with a higher one first, and of equal ones the left.
        colours: text → the colour that it has on a terminal.
    """

    title: str
    text: Callable[[Row], str | None]
    wide: bool = False
    is_text: bool = False
    wraps: bool = False
    is_optional: bool = False
    least: int = _LEAST
    keep: int = 0
    colours: Mapping[str, str] = field(default_factory=dict)


def output_option() -> Option:
    """The flag `-o`, which sets the parameter `output`."""
    return Option(
        ["-o", "--output"],
        section="Output",
        type=click.Choice(["table", "wide", "json", "yaml"]),
        default="table",
        help="wide: more columns; json, yaml: for programs, their keys stay.  [default: table]",
    )


def show(
    rows: Sequence[Row], columns: Sequence[Column[Row]], output: str, to_dict: Callable[[Row], dict[str, Any]]
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
    to_dict: Callable[[Row], dict[str, Any]],
    *,
    watch: bool,
) -> None:
    """`show` jobs, which come the newest first: on a terminal that is too low for all, the newest last."""
    is_low = sys.stdout.isatty() and not watch and len(rows) + 2 > shutil.get_terminal_size().lines
    if output in ("json", "yaml") or not is_low:
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
    return _table(rows, chosen, width, terminal and not os.environ.get("NO_COLOR"))


def bold(text: str) -> str:
    """A title; click.echo drops what makes it bold in a pipe."""
    return click.style(text, bold=True)


def show_data(data: Any, output: str) -> None:
    """Print what JSON can hold as `json` or `yaml`, in ASCII."""
    text = json.dumps(data, indent=None if output == "yaml" else 2)
    if output == "yaml":
        import yaml

        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        text = yaml.dump(json.loads(text), Dumper=dumper, sort_keys=False).rstrip("\n")  # read back: without aliases
    click.echo(text)


def _table(rows: Sequence[Row], columns: Sequence[Column[Row]], width: int | None, colour: bool) -> list[str]:
    """The lines of a table, the heading first. Works by column: that is several times faster than by cell."""
    found = [(column, list(map(column.text, rows))) for column in columns]
    found = [(it, texts) for it, texts in found if not it.is_optional or any(text is not None for text in texts)]
    columns, cells = [it for it, _ in found], [_clean([it.title, *texts]) for it, texts in found]
    widths = [max(map(len if "".join(texts).isascii() else display_width, texts)) for texts in cells]
    rooms = dict(enumerate(widths)) if width is None else _fit(widths, columns, width)
    last = max(rooms, default=0)
    is_cut = len(rooms) < len(columns) and sum(rooms.values()) + len(GAP) * (len(rooms) - 1) + len(_MORE) <= (
        width or 0
    )
    drawn, more = [], {}  # more: row → the lines under its first one
    for i in (i for i in rooms if columns[i].wraps and rooms[i] < widths[i]):
        indent = " " * sum(rooms[other] + len(GAP) for other in rooms if other != i)
        wrapped = [
            textwrap.wrap(text, rooms[i], break_on_hyphens=False, break_long_words=False) or [""] for text in cells[i]
        ]
        cells[i] = [parts[0] for parts in wrapped]
        more = {row: [indent + part for part in parts[1:]] for row, parts in enumerate(wrapped)}
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
    return [line for row, first in enumerate(lines) for line in (first, *more.get(row, ()))]


def _clean(texts: list[str | None]) -> list[str]:
    """All that can be printed as it is, in most cases after one look at the whole column."""
    filled = ["-" if text is None else text for text in texts]
    return filled if "".join(filled).isprintable() else [printable(text) for text in filled]


def _fit(widths: list[int], columns: Sequence[Column[Row]], width: int) -> dict[int, int]:
    """Column → width, of those that fit: text is cut first, then columns are left out, then the first one is cut.

    A wide table has all columns that it would have if it was not.
    """
    least = {i: min(widths[i], it.least) if it.is_text else widths[i] for i, it in enumerate(columns)}

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
