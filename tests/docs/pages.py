"""The pages of the documentation, as GitHub and the site read them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tools.handbook import chinese

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
READMES = (README, chinese.README)
SKILL = ROOT / "src" / "paceline" / "cli" / "SKILL.md"  # what `paceline skill` prints
PAGES = (*READMES, *sorted(DOCS.rglob("*.md")))
CHINESE = (*chinese.twins(), chinese.GLOSSARY)
_FENCE = re.compile(r"^( *)```(\w*)$")
_MARK = re.compile(r"^ *<!-- (\w+): ?(.*) -->$")
_HEADING = re.compile(r"^(#+) (?:<a id=\"([\w-]+)\"></a>)?(.*)$")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text without the indentation, and the mark in the comment above it."""

    page: Path
    line: int
    language: str
    text: str
    mark: str = ""
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def config() -> dict[str, Any]:
    """What mkdocs.yml says."""
    read = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert isinstance(read, dict)
    return read


def navigation(entries: list[Any] | None = None) -> list[str]:
    """The pages that mkdocs.yml names, in its order."""
    found: list[str] = []
    for entry in config()["nav"] if entries is None else entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += navigation(value) if isinstance(value, list) else [value]
    return found


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    found: list[Block] = []
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        opened = _FENCE.match(lines[number])
        if opened is None:
            number += 1
            continue
        indent, language = opened.groups()
        start = number
        number += 1
        while lines[number] != f"{indent}```":
            number += 1
        above = [line for line in lines[max(0, start - 2) : start] if line.strip()]
        mark = _MARK.match(above[-1]) if above else None
        text = "".join(f"{line.removeprefix(indent)}\n" for line in lines[start + 1 : number])
        found.append(Block(page, start + 1, language, text, *(mark.groups() if mark else ())))
        number += 1
    return found


def prose(page: Path) -> list[tuple[int, str]]:
    """The numbered lines of a page that are in no block."""
    found, inside = [], False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.strip().startswith("```"):
            inside = not inside
        elif not inside:
            found.append((number, line))
    return found


def slug(heading: str, site: bool = False) -> str:
    """The anchor of a heading on GitHub, or on the site (Python-Markdown), without the numbers of repeated ones."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # a link: its text
    words = re.sub(r"[^\w\s-]", "", words.replace("`", "")).strip().lower()
    return re.sub(r"[-\s]+", "-", words) if site else words.replace(" ", "-")


def headings(page: Path) -> list[str]:
    """The headings of a page."""
    return [found[3] for _, line in prose(page) if (found := _HEADING.match(line))]


def anchors(page: Path) -> list[tuple[int, str]]:
    """The level of each heading of a page, and its anchor: a Chinese heading names that of its English twin."""
    found = (_HEADING.match(line) for _, line in prose(page))
    return [(len(it[1]), it[2] or slug(it[3])) for it in found if it]


def links(page: Path) -> list[tuple[int, str]]:
    """The line and the target of each link and picture of a page that leads to no other server."""
    found = []
    text = "\n".join(re.sub(r"`[^`]*`", "", line) for _, line in prose(page))
    numbers = [number for number, _ in prose(page)]
    for match in _LINK.finditer(text):
        target = match[1] or match[2]
        if not target.startswith(("http://", "https://", "mailto:")):
            found.append((numbers[text.count("\n", 0, match.start())], target))
    return found
