"""Say which pages in Chinese are older than their English twins: `python -m tools.handbook.chinese [PAGE…]`.

The first line of a Chinese page has the id that git gives the English text it was translated from. Without arguments
this lists the pages whose English text has changed since; with pages, it writes into them that they are translated.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.zh-CN.md"
FOLDER = ROOT / "docs" / "zh"
GLOSSARY = FOLDER / "glossary.md"
_FIRST = re.compile(r"<!-- translated from git blob ([0-9a-f]{40}) -->\n")


def twins() -> dict[Path, Path]:
    """Each Chinese page, and the English one that it is translated from."""
    pages = {page: FOLDER.parent / page.name for page in sorted(FOLDER.glob("*.md")) if page != GLOSSARY}
    return {README: ROOT / "README.md", **pages}


def blob(page: Path) -> str:
    """The id that git gives the text of a page."""
    text = page.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(text) + text, usedforsecurity=False).hexdigest()


def older(page: Path) -> str:
    """What to do about a Chinese page that is older than its twin; empty if it is not."""
    english = twins()[page]
    found = _FIRST.match(page.read_text())
    if found and found[1] == blob(english):
        return ""
    name, of = page.relative_to(ROOT), english.relative_to(ROOT)
    changes = f"`git diff {found[1]} {of}` shows what changed; " if found else ""
    return f"{name} is older than {of}: {changes}translate it, then `python -m tools.handbook.chinese {name}`"


def renew(page: Path) -> None:
    """Write into a page that it is translated from what its twin says now."""
    text = _FIRST.sub("", page.read_text(), count=1)
    page.write_text(f"<!-- translated from git blob {blob(twins()[page])} -->\n{text}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, nargs="*", help="a page in Chinese that is translated as its twin is now")
    named = [page.resolve() for page in parser.parse_args().page]
    if unknown := [str(page) for page in named if page not in twins()]:
        parser.error(f"no page in Chinese that has an English twin: {', '.join(unknown)}")
    for page in named:
        renew(page)
    if not named:
        print(*filter(None, map(older, twins())), sep="\n")
