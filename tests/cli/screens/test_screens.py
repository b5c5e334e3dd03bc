"""The screens that people look at, as text files: a change of one is reviewed like a change of code.

`PACELINE_RECORD=1 pytest tests/cli/screens` records them again.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cli.screens import cases

from paceline.backends import everywhere
from paceline.cli import main
from paceline.cli.flags import where as flags_where
from paceline.cli.terminal import write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backends.base import Backend

RECORDED = Path(__file__).with_name("recorded")
WIDTHS = (80, 120, 160)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(monkeypatch: pytest.MonkeyPatch, places: Sequence[Backend], width: int, *args: str) -> str:
    """What a command shows on a terminal of 24 lines, stdout and stderr in one."""
    monkeypatch.setattr(time, "time", lambda: cases.NOW)
    monkeypatch.setattr(socket, "gethostname", lambda: "vm")
    loaded = [everywhere.Place(it.name, lambda it=it: it) for it in places]  # type: ignore[misc]
    monkeypatch.setattr(everywhere, "places", lambda since=None: loaded)
    monkeypatch.setattr(flags_where, "_backend_of", lambda names, given: places[0])
    monkeypatch.setattr(write, "_said", set())
    monkeypatch.setattr(sys, "argv", ["paceline", *args])
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # else help names how pytest was started
    variables = {"COLUMNS": str(width), "LINES": "24", "NO_COLOR": "1", "XDG_CONFIG_HOME": "/home/ada/.config"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    shown = Terminal()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        main.run()
    return shown.getvalue()


@pytest.mark.parametrize("name", cases.SCREENS)
def test_a_screen_is_as_it_is_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places, args = cases.SCREENS[name]
    text = ""
    for width in WIDTHS:
        lines = screen(monkeypatch, places, width, *args).splitlines()
        text += "\n".join([f"{f' {width} columns ':-^{width}}", *lines, ""])
    file = RECORDED / f"{name}.txt"
    if os.environ.get("PACELINE_RECORD"):
        file.write_text(text)
    assert text == file.read_text(), (
        f"look at the difference; if it is meant: PACELINE_RECORD=1 pytest {Path(__file__).parent}"
    )


def test_every_recorded_screen_is_shown() -> None:
    assert {path.stem for path in RECORDED.iterdir()} == set(cases.SCREENS)
