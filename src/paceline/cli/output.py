"""What the verbs print: tables, JSON, YAML."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class Column:
    """A column of a table; `wide` ones are shown by -o wide alone."""

    title: str
    value: Callable[[Any], Any]
    wide: bool = False


output_option = click.option(
    "-o", "--output", type=click.Choice(["table", "wide", "json", "yaml"]), default="table", help="How to show it."
)


def show(items: Sequence[Any], columns: Sequence[Column], output: str, one: bool = False) -> None:
    """Print items."""
    if output in ("json", "yaml"):
        values = [item if isinstance(item, dict) else item.to_dict() for item in items]
        click.echo(json.dumps(values[0] if one else values, indent=2))
        return
    shown = [c for c in columns if not c.wide or output == "wide"]
    rows = [[c.title for c in shown], *([str(c.value(item)) for c in shown] for item in items)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
