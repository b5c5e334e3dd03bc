"""What the screen makes of what happens to a job."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.terminal.screen import _short


@given(st.text(st.sampled_from("ab é"), max_size=400))
def test_a_long_message_is_cut_between_words(text: str) -> None:
    short = _short(text)
    if len(text) <= 200:
        assert short == text
        return
    kept = short.removesuffix(" …")
    assert kept != short
    assert text.startswith(kept)
    assert len(kept) <= 200
    assert text[len(kept)] == " " or " " not in text[1:200]
