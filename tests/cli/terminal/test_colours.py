"""What of a job's output a terminal gets."""

from __future__ import annotations

import io
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.terminal.write import ColoursOnly

SGR = re.compile(rb"\x1b\[[0-9;:]*m")
PARTS = [b"\x1b", b"[", b"]", b"m", b"K", b"31", b";", b":", b"0", b"?", b"\x07", b"\x9b", b"\xc2\x9b", b"\xc0\x9b",
         b"\xc2", b"\xe0\x82", b"\xc3\xa9", b"\xf0\x9f\x9a\xb2", b"\r", b"\n", b"\t", b"\b", b"\0", b"\x7f", b"loss",
         b"\x1b[1;31m", b"\x1b[m", b"\x1b]52;c;eA==\x07", b"\x1b]8;;http://h\x1b\\", b"\x1bP", b"9" * 70]  # fmt: skip
outputs = st.lists(st.sampled_from(PARTS) | st.binary(max_size=3), max_size=12)


def shown(*pieces: bytes, encoding: str = "utf-8") -> bytes:
    colours = ColoursOnly(io.TextIOWrapper(io.BytesIO(), encoding))
    return b"".join([*map(colours.feed, pieces), colours.end()])


@given(outputs)
def test_a_terminal_gets_text_and_colours_alone(pieces: list[bytes]) -> None:
    rest = SGR.sub(b"", shown(*pieces)).decode()
    assert [c for c in rest if unicodedata.category(c) == "Cc" and c not in "\t\n\r"] == []
    ascii_only = shown(*pieces, encoding="latin-1")
    assert ascii_only.isascii()
    assert set(SGR.sub(b"", ascii_only)) <= {*b"\t\n\r", *range(32, 127)}


@given(outputs, st.data())
def test_it_does_not_matter_how_the_output_is_split(pieces: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(pieces)
    cut = data.draw(st.integers(0, len(whole)))
    assert shown(*pieces) == shown(whole) == shown(whole[:cut], whole[cut:])


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"])))
def test_text_is_not_changed(text: str) -> None:
    line = f"\r{text}\t\x1b[1;38;5;9m{text}\x1b[0m\r\n".encode()
    assert shown(line) == line


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (b"\x1b]0;title\x07", rb"\x1b]0;title\x07"),
        (b"\x1b]52;c;cm0=\x1b\\", rb"\x1b]52;c;cm0=\x1b" + b"\\"),
        (b"\x1b]8;;http://h\x07x\x1b]8;;\x07", rb"\x1b]8;;http://h\x07x\x1b]8;;\x07"),
        (b"\x1b[2J\x1b[6n", rb"\x1b[2J\x1b[6n"),
        (b"\xc2\x9b2J", rb"\x9b2J"),  # a C1 control in UTF-8
        (b"\x9b2J", rb"\x9b2J"),  # and of 8 bits
        (b"\xc0\x9b[2J", rb"\xc0\x9b[2J"),  # an ESC in two bytes, for a terminal that is lax
        (b"\x1b[>4;2m", rb"\x1b[>4;2m"),  # no SGR
        (b"\x1b[31mred", b"\x1b[31mred\x1b[0m"),  # what comes after it is not red
        (b"\x1b[31", rb"\x1b[31"),
        (b"\r 10%\r 20%\r\n", b"\r 10%\r 20%\r\n"),
    ],
)
def test_examples(written: bytes, expected: bytes) -> None:
    assert shown(written) == expected
