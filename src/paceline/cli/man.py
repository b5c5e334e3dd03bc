"""Manual pages, made from the help of the verbs; a build puts them into the wheel (`hatch_build.py`)."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import click

from paceline._version import __version__
from paceline.cli.main import VERBS, cli

if TYPE_CHECKING:
    from collections.abc import Iterator


def pages() -> dict[str, str]:
    """File name → a page in the macros of man(7): one for paceline, and one for each verb."""
    return dict(_pages(cli, None, "paceline", "Train a script on one machine or many."))


def _pages(command: click.Command, parent: click.Context | None, name: str, summary: str) -> Iterator[tuple[str, str]]:
    context = click.Context(command, parent, name, **command.context_settings)
    within = {}
    if isinstance(command, click.Group):
        for verb in command.list_commands(context):
            inner = command.get_command(context, verb)
            assert inner is not None
            within[verb] = VERBS[verb][1] if parent is None else inner.get_short_help_str(200)
            yield from _pages(inner, context, verb, within[verb])
    page, above = (it.command_path.replace(" ", "-") if it else "" for it in (context, parent))
    others = [*filter(None, [above]), *(f"{page}-{verb}" for verb in within)]
    lines = [
        f'.TH {page.upper()} 1 "" "paceline {__version__}" "paceline"',
        ".SH NAME",
        f"{_text(page)} \\- {_text(summary[:1].lower() + summary[1:].rstrip('.'))}",
        ".SH SYNOPSIS",
        f".B {_text(context.command_path)}",
        _text(" ".join(command.collect_usage_pieces(context))),
        ".SH DESCRIPTION",
        *_paragraphs(command.help or ""),
        *_sections({"Verbs": [*within.items()]} if within else {}),
        *_sections(_options(context)),
        ".SH SEE ALSO",
        ", ".join(f"\\fB{_text(other)}\\fR(1)" for other in others),
    ]
    yield f"{page}.1", "\n".join(lines) + "\n"


def _options(context: click.Context) -> dict[str, list[tuple[str, str]]]:
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in context.command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            sections.setdefault(getattr(parameter, "section", "Options"), []).append(record)
    return sections


def _sections(sections: dict[str, list[tuple[str, str]]]) -> Iterator[str]:
    for title, records in sections.items():
        yield f".SH {_text(title.upper())}"
        for term, text in records:
            yield from (".TP", f".B {_text(term)}", _text(" ".join(text.split())) or "\\&")


def _paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a help text; one after click's \\b keeps its lines."""
    for number, paragraph in enumerate(inspect.cleandoc(text).split("\n\n")):
        lines = [_text(line) for line in paragraph.strip().strip("\b").strip().splitlines()]
        yield from [".PP"] * bool(number)
        yield from (".nf", *lines, ".fi") if "\b" in paragraph else lines


def _text(text: str) -> str:
    """Text as roff has it, in ASCII, which every device shows."""
    plain = text.replace("\\", "\\e").replace("-", "\\-").replace("…", "...")
    plain = "".join(letter if letter.isascii() else f"\\[u{ord(letter):04X}]" for letter in plain)
    return f"\\&{plain}" if plain.startswith((".", "'")) else plain
