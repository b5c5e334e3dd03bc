"""`paceline trust`: agree to the settings of a project that run programs or choose credentials."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.flags.option import SectionedCommand
from paceline.cli.terminal.write import agrees, say
from paceline.job import trust as agreements
from paceline.job.errors import UserError
from paceline.job.settings_files import PROJECT_FILE, project_file
from paceline.job.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping


def asks(file: Path, settings: Mapping[str, Any]) -> bool:
    """Show these settings of a project and ask for them, on a terminal; returns whether the user says yes."""
    is_terminal = sys.stdin.isatty() and sys.stderr.isatty()
    if not is_terminal or threading.current_thread() is not threading.main_thread():
        return False
    _show(file, settings)
    return agrees("obey them, now and as long as they stay so?")


def _show(file: Path, settings: Mapping[str, Any]) -> None:
    say(printable(f"{file} runs programs or chooses credentials:"))
    for name, value in settings.items():
        say(printable(f"  {name} = {value!r}"))


def _trust(file: str | None) -> int:
    """Agree to what a project's paceline.toml sets that runs programs or chooses credentials.

    Without this, paceline asks for it on a terminal, and refuses it elsewhere. Your own settings need no agreement, and
    a change of such a setting needs a new one.
    """
    from paceline.job.settings import read_table

    path = project_file() if file is None else Path(file).resolve()
    if path is None:
        raise UserError(f"there is no {PROJECT_FILE} in this folder or above it; name a file")
    table = read_table(path, is_project=True)
    if table is None:
        raise UserError(printable(f"{path} cannot be trusted: it is not there, or another user may have written it"))
    settings = agreements.guarded(table)
    if not settings:
        say(printable(f"{path} runs no programs and chooses no credentials; it needs no agreement"))
        return 0
    _show(path, settings)
    agreements.agree(path, settings)
    say("you have agreed to them, as long as they stay so")
    return 0


trust = SectionedCommand("trust", callback=_trust, params=[click.Argument(["file"], required=False, metavar="[FILE]")])
