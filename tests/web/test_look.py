"""The colours of the page: what is written in one stands out from what is behind it, in both themes (WCAG AA)."""

from __future__ import annotations

import importlib.resources
import re

import pytest

STYLE = (importlib.resources.files("paceline.web") / "static" / "style.css").read_text(encoding="utf-8")
COLOURS = {
    name: (light, dark)
    for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", STYLE)
}
GROUNDS = ("bg", "bg-raised", "bg-sunken", "bg-hover")
STATES = ("good", "bad", "warn", "busy")
# What is written → behind what; AA asks for 4.5 of text, and for 3 of borders and marks.
TEXTS = {
    **dict.fromkeys(("text", "text-weak"), GROUNDS), "accent": ("bg", "bg-raised", "bg-hover", "accent-bg"),
    **{state: ("bg", "bg-raised", f"{state}-bg") for state in STATES}, "on-accent": ("accent", "bad"),
}  # fmt: skip
MARKS = {"line-strong": ("bg", "bg-raised"), "accent": GROUNDS}
PAIRS = [(text, ground, 4.5) for text, grounds in TEXTS.items() for ground in grounds]
PAIRS += [(mark, ground, 3.0) for mark, grounds in MARKS.items() for ground in grounds]


def luminance(colour: str) -> float:
    """As WCAG 2 defines it, of `#rrggbb`."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (it / 12.92 if it <= 0.04045 else ((it + 0.055) / 1.055) ** 2.4 for it in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_have_contrast(theme: str) -> None:
    low = []
    for one, other, least in PAIRS:
        high, dim = sorted((luminance(COLOURS[name][theme == "dark"]) for name in (one, other)), reverse=True)
        if (found := (high + 0.05) / (dim + 0.05)) < least:
            low.append(f"--{one} on --{other}: {found:.2f}, at least {least}")
    assert not low, "\n".join(low)


def test_variables_that_are_used_are_there() -> None:
    known = set(re.findall(r"(--[\w-]+):", STYLE))
    assert set(re.findall(r"var\((--[\w-]+)", STYLE)) <= known
