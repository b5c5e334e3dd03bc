"""The site of the documentation, read from files in a browser: search, light and dark, and on a phone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.docs.test_site import build

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lab.web.browser import Browser

pytestmark = pytest.mark.needs("chromium")
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
SHOWN = """(() => {  // what the page and the elements in it show that have a tree of their own
    const words = root => [root.textContent, ...[...root.querySelectorAll('*')].map(inner)];
    const inner = it => it.shadowRoot ? words(it.shadowRoot) : '';
    return words(document.body).flat(9).join(' ');
})()"""


def test_the_site_is_read_from_files(tmp_path: Path, chromium: Browser) -> None:
    site = build(tmp_path)
    chromium.resize(1200, 800)
    chromium.open(f"file://{site}/run.html")
    chromium.shows("What is started")
    light = chromium.run(BACKGROUND)
    chromium.emulate(prefers_color_scheme="dark")
    chromium.until(f"{BACKGROUND} !== {json.dumps(light)}")
    search(chromium, "rendezvous")
    chromium.open(f"file://{site}/zh/resume.html")
    chromium.shows("宽限期")
    search(chromium, "样本恰好")  # is within a sentence, where Chinese has no spaces
    chromium.resize(390, 800)
    for name in ("index", "jobs", "reference", "measured-training", "zh/first-steps"):
        chromium.open(f"file://{site}/{name}.html")
        assert chromium.run("document.documentElement.scrollWidth") <= 390, f"{name} is wider than a phone"


def search(chromium: Browser, words: str) -> None:
    """Search the site for words, and wait until there are results."""
    chromium.press("/")
    chromium.until("document.activeElement !== document.body")
    chromium.call("Input.insertText", text=words)
    chromium.until(f"/[0-9]+ results?/.test({SHOWN})")
