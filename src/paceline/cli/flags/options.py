"""Options grouped under headings, and the values that several verbs parse alike."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

OUT, ERR, BOTH = 1, 2, 3
_STREAMS = {"none": 0, "all": BOTH, "0": 0, "1": OUT, "2": ERR, "3": BOTH}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Option(click.Option):
    """A click option that stands under a heading in `--help`."""

    def __init__(self, *args: Any, section: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class Count(click.IntRange):
    """A number of devices; their names belong to another flag."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number.

        Raises:
            click.BadParameter: it is none.
        """
        if isinstance(value, str) and "," in value:
            self.fail(f"{value!r} names devices; write --devices {value}", param, ctx)
        return super().convert(value, param, ctx)


class SectionedCommand(click.Command):
    """Prints its options heading by heading, in the order in which they are defined."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the headings."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(parameter, "section", "Other"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def parse_pairs(flag: str, pairs: Iterable[str], variable: bool = False) -> dict[str, str]:
    """NAME=VALUE pairs of a repeatable flag.

    Args:
        flag: its name.
        pairs: what was given.
        variable: whether the names are those of environment variables.

    Raises:
        UserError: one has no `=`, or its name is none.
    """
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        shown = f"{name}=…" if variable and equals else pair  # the value may be a secret
        if not equals or not name or "\0" in pair:
            example = "LR=0.1" if variable else "team=vision"
            raise UserError(f"{flag} {shown!r} is not NAME=VALUE; write for example {flag} {example}")
        if variable and not _VARIABLE.fullmatch(name):
            raise UserError(f"{flag} {shown!r}: a variable's name has letters from A to Z, digits and '_'; rename it")
        found[name] = value
    return found


def parse_streams(flag: str, text: str, ranks: int) -> dict[int, int]:
    """Which streams of which local ranks a flag such as --tee names: local rank → 0, OUT, ERR or BOTH.

    The forms are torchrun's: one number for all (0 none, 1 stdout, 2 stderr, 3 both) or `0:3,1:2` by local rank; `all`
    and `none` stand for 3 and 0.

    Raises:
        UserError: the text has none of these forms, or names a rank that is not there.
    """
    if text in _STREAMS:
        return dict.fromkeys(range(ranks), _STREAMS[text])
    chosen = dict.fromkeys(range(ranks), 0)
    for part in text.split(","):
        rank, colon, streams = part.partition(":")
        if not colon or not rank.isdecimal() or streams not in _STREAMS:
            raise UserError(
                f"{flag} {text!r} is not all, none, 0 … 3 or RANK:STREAMS,…; write for example {flag} 0:3,1:2"
            )
        if int(rank) >= ranks:
            raise UserError(f"{flag} names local rank {rank}, but there are {ranks} on this node, numbered from 0")
        chosen[int(rank)] = _STREAMS[streams]
    return chosen


def parse_numbers(flag: str, text: str) -> list[int]:
    """Whole numbers separated by commas.

    Raises:
        UserError: the text has another form.
    """
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"{flag} {text!r} is not a list of numbers; write for example {flag} 0,1")
    return [int(part) for part in parts]


def parse_address(flag: str, text: str) -> tuple[str, int | None]:
    """HOST or HOST:PORT, an IPv6 address in brackets included; port None when there is none.

    Raises:
        UserError: there is no host, or the port is none.
    """
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^:\[\]\s]+)(?::(\d{1,5}))?", text)
    if match is None or (match[2] is not None and int(match[2]) > 65535):
        raise UserError(f"{flag} {text!r} is not HOST or HOST:PORT; write for example {flag} node0:29400")
    return match[1].strip("[]"), None if match[2] is None else int(match[2])
