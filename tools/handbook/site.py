"""Finish the site that Zensical or MkDocs has built: `python -m tools.handbook.site FOLDER`.

Both take a script for the search within files from another server; a copy of it takes its place. After that, nothing in
the site may load anything from elsewhere.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

SHIM = Path(__file__).with_name("iframe-worker.js")
_ELSEWHERE = "https://unpkg.com/iframe-worker/shim"
_LOADS = re.compile(
    r'<(?:script|img|iframe|source)\b[^>]*\bsrc(?:set)?="?(?:https?:)?//|<link\b[^>]*\bhref="?(?:https?:)?//'
)


def finish(folder: Path) -> None:
    """Make the site complete without a network, or raise ValueError for what it would load."""
    shutil.copy(SHIM, folder / "assets" / "javascripts" / SHIM.name)
    for page in folder.rglob("*.html"):
        up = "../" * (len(page.relative_to(folder).parts) - 1)
        text = page.read_text().replace(_ELSEWHERE, f"{up}assets/javascripts/{SHIM.name}")
        if found := _LOADS.search(text):
            raise ValueError(f"{page}: loads something from another server: {text[found.start() : found.end() + 80]}")
        if page.parent.name == "zh":  # browsers choose the font by it
            text = re.sub(r'<html lang="?en"?', '<html lang="zh-Hans"', text, count=1)
        page.write_text(text)


if __name__ == "__main__":
    finish(Path(sys.argv[1]))
