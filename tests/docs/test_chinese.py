"""The pages in Chinese say what their English twins say, with the terms of the glossary."""

from __future__ import annotations

import itertools
import re
import shutil
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.docs.pages import CHINESE, ROOT, anchors, blocks, links, prose
from tools.handbook import chinese

if TYPE_CHECKING:
    from pathlib import Path

TWINS = chinese.twins()
ENGLISH = {english: page for page, english in TWINS.items()}
WEB = [ROOT / "src" / "paceline" / "web" / "static" / name for name in ("i18n.js", "zh.json")]
HAN = "[一-鿿]"
BADLY_SET = {  # what is no good Chinese typography, and what to write
    rf"{HAN}[,;:!?]|[,;:!?]{HAN}|{HAN}\(|\){HAN}": "full-width punctuation beside Chinese characters",
    rf"{HAN}[A-Za-z0-9]|[A-Za-z0-9]{HAN}": "a space between Chinese and Latin characters",
    r"[。\uff0c\uff1a\uff1b\uff01\uff1f\uff09]\*\*\S": "a space behind bold text that ends with punctuation",
}
each_page = pytest.mark.parametrize("page", TWINS, ids=lambda page: str(page.relative_to(ROOT)))


def glossary() -> tuple[list[str], list[str]]:
    """The terms that stand for something, and those that are not used."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]*)\|$", chinese.GLOSSARY.read_text(), re.MULTILINE)
    terms = [term for _, cell, _ in rows for term in cell.split("、")]
    return terms, [term for *_, cell in rows[1:] for term in cell.strip().split("、") if term and term != "不用"]


def plain(page: Path) -> list[tuple[int, str]]:
    """The numbered lines of a page as they are read: links without targets, and a letter for each piece of code."""
    text = "\n".join(line for _, line in prose(page))
    text = re.sub(r"`[^`]+`", lambda code: "x" + "\n" * code[0].count("\n"), text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)\s]*\)|<[^>]*>", r"\1", text)
    numbers = [number for number, _ in prose(page)]
    return list(zip(numbers, text.split("\n"), strict=True))


def texts(path: Path) -> list[tuple[int, str]]:
    """The numbered lines in Chinese of a page, or of the program's page in a browser."""
    if path in WEB:
        lines = enumerate(path.read_text().splitlines(), 1)
        pairs = ((number, text) for number, line in lines for text in re.findall(r'"((?:[^"\\]|\\.)*)"', line))
        return [(number, re.sub(r"\{\w+\}", "x", text)) for number, text in pairs if re.search(HAN, text)]
    return [it for it in plain(path) if not (path == chinese.GLOSSARY and it[1].startswith("|"))]


@pytest.mark.parametrize("path", [*CHINESE, *WEB], ids=lambda path: str(path.relative_to(ROOT)))
def test_the_terms_are_those_of_the_glossary(path: Path) -> None:
    terms, others = glossary()
    wrong = []
    for number, line in texts(path):
        left = re.sub("|".join(sorted(terms, key=len, reverse=True)), "、", line)
        wrong += [f"{number}: {other}" for other in others if other in left]
    assert not wrong, "docs/zh/glossary.md has another term for:\n" + "\n".join(wrong)


@pytest.mark.parametrize("path", [*CHINESE, *WEB], ids=lambda path: str(path.relative_to(ROOT)))
def test_chinese_is_set_as_chinese(path: Path) -> None:
    lines = texts(path)
    wrong = [
        f"{number}: {found[0]}: {what}"
        for number, line in lines
        for pattern, what in BADLY_SET.items()
        if (found := re.search(pattern, line.replace("**", "") if r"\*" not in pattern else line))
    ]
    if path not in WEB:
        wrong += [
            f"{number}: {line[-5:]}: break the line at punctuation, or browsers show a space within a sentence"
            for (number, line), (following, then) in itertools.pairwise(lines)
            if following == number + 1 and re.search(f"{HAN}$", line) and re.match(rf"\s*{HAN}", then)
        ]
    assert not wrong, "\n".join(wrong)


@each_page
def test_a_page_is_no_older_than_its_twin(page: Path) -> None:
    assert not (todo := chinese.older(page)), todo


@each_page
def test_a_page_has_the_blocks_of_its_twin(page: Path) -> None:
    ours, theirs = ([(it.language, it.text, it.mark, it.reason) for it in blocks(of)] for of in (page, TWINS[page]))
    assert ours == theirs


@each_page
def test_a_page_has_the_headings_of_its_twin_with_their_anchors(page: Path) -> None:
    ours, theirs = anchors(page), anchors(TWINS[page])
    assert ours[0][0] == theirs[0][0] == 1
    assert ours[1:] == theirs[1:], 'write `## <a id="anchor"></a>标题`'


@each_page
def test_a_page_leads_to_where_its_twin_leads_in_chinese_if_that_is_there(page: Path) -> None:
    english = TWINS[page]
    ours = Counter(it for it in _targets(page) if it[0] != english)
    theirs = Counter((ENGLISH.get(path, path), anchor) for path, anchor in _targets(english) if path != page)
    assert ours == theirs


@each_page
def test_a_page_names_the_code_that_its_twin_names(page: Path) -> None:
    ours, theirs = _code(page), _code(TWINS[page])
    assert not ours - theirs, "it has more"
    assert not theirs - ours, "it lacks some"


def test_a_page_whose_twin_has_changed_is_named_until_it_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "docs" / "zh", tmp_path / "docs" / "zh")
    monkeypatch.setattr(chinese, "ROOT", tmp_path)
    monkeypatch.setattr(chinese, "FOLDER", tmp_path / "docs" / "zh")
    page, english = tmp_path / "docs" / "zh" / "index.md", tmp_path / "docs" / "index.md"
    shutil.copy(ROOT / "docs" / "index.md", english)
    before = chinese.blob(english)
    assert not chinese.older(page)
    english.write_text("# Something else\n")
    assert f"git diff {before} docs/index.md" in chinese.older(page)
    chinese.renew(page)
    assert not chinese.older(page)
    assert page.read_text().count("<!-- translated") == 1


def _targets(page: Path) -> list[tuple[Path, str]]:
    parts = [target.partition("#") for _, target in links(page)]
    return [((page.parent / name).resolve() if name else page, anchor) for name, _, anchor in parts]


def _code(page: Path) -> set[str]:
    text = "\n".join(line for _, line in prose(page))
    return {re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]+)`", text)}
