"""The site: mkdocs.yml names every page, links lead somewhere on GitHub and on the site, and it can be built."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.pages import CHINESE, DOCS, PAGES, READMES, ROOT, anchors, headings, links, navigation, slug

ZENSICAL = ROOT / ".venv-docs" / "bin" / "zensical"


def test_the_navigation_names_every_page_once() -> None:
    """Zensical ignores `exclude_docs` in silence, so what is in docs/ is on the site, and has to be found there."""
    assert sorted(navigation()) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_exist(page: Path) -> None:
    wrong = []
    for line, target in links(page):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            wrong.append(f"{line}: {target}: there is no such file")
        elif page not in READMES and DOCS not in path.parents:
            wrong.append(f"{line}: {target}: the site has only what is in docs/; write the name without a link")
        elif anchor and anchor not in {name for _, name in anchors(path)}:
            wrong.append(f"{line}: {target}: there is no such heading")
    assert not wrong, "\n".join(wrong)


def test_what_the_source_and_the_changelog_name_is_there() -> None:
    """Messages of the program lead to pages, and to their headings."""
    named = set[tuple[str, str]]()
    for path in (ROOT / "CHANGELOG.md", ROOT / "examples" / "README.md", *(ROOT / "src").rglob("*.py")):
        named |= set(re.findall(r"(?<![\w/])docs/([\w-]+\.md)(?:#([\w-]+))?", path.read_text()))
    assert len(named) > 10
    for page, anchor in named:
        assert (DOCS / page).exists(), page
        assert not anchor or anchor in map(slug, headings(DOCS / page)), f"{page}#{anchor}"


@pytest.mark.parametrize("page", [it for it in PAGES if it not in {*READMES, *CHINESE}], ids=lambda page: page.name)
def test_headings_have_the_same_anchor_on_github_and_on_the_site(page: Path) -> None:
    found = headings(page)
    assert [slug(heading) for heading in found] == [slug(heading, site=True) for heading in found]
    assert len(set(map(slug, found))) == len(found), "two headings have the same anchor"


def build(folder: Path) -> Path:
    """Build the site in a folder; returns where it is."""
    if not ZENSICAL.exists():
        pytest.skip("needs the environment that `make docs` sets up")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copytree(DOCS, folder / "docs")
    environment = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(
        [ZENSICAL, "build", "--strict"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    site = folder / "build" / "docs"
    subprocess.run([sys.executable, "-m", "tools.handbook.site", site], cwd=ROOT, timeout=60, check=True)
    return site


def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    site = build(tmp_path)
    pages = {name.removesuffix(".md") + ".html" for name in navigation()}
    assert {str(page.relative_to(site)) for page in site.rglob("*.html")} == pages | {"404.html"}
    assert "unpkg.com/iframe" not in (site / "index.html").read_text()
