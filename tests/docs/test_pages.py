"""Pages can be read: none is long or wide, and what is made by code is what the code makes."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

import pytest
from tests.docs.pages import PAGES, ROOT, SKILL
from tools.handbook import pictures, reference

if TYPE_CHECKING:
    from pathlib import Path

MOST_LINES = 250
WIDTH = 120
OTHERS = tuple(ROOT / f"{name}.md" for name in ("AGENTS", "CHANGELOG", "CODE_OF_CONDUCT", "CONTRIBUTING", "SECURITY"))
MADE = {**pictures.pictures(), **reference.pages()}


def columns(line: str) -> int:
    """The width of a line on a screen, where a Chinese character has two columns."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in line)


@pytest.mark.parametrize("page", (*PAGES, *OTHERS, SKILL), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_neither_long_nor_wide(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert len(lines) <= MOST_LINES, "split the page"
    wide = [number for number, line in enumerate(lines, 1) if columns(line) > WIDTH]
    assert not wide, f"lines {wide} have more than {WIDTH} columns; turn wide tables into lists"


@pytest.mark.parametrize("path", MADE, ids=lambda path: path.name)
def test_what_is_made_by_code_is_as_the_code_makes_it(path: Path) -> None:
    assert path.read_text() == MADE[path], "make it anew: python -m tools.handbook"
