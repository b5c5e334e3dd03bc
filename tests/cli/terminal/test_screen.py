"""What the screen makes of what happens to a job."""

from __future__ import annotations

import signal
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.foreground import Event, RankStreams
from paceline.cli.terminal.screen import Screen, _short

if TYPE_CHECKING:
    import pytest


@dataclass
class Job:
    """A job whose ranks run nowhere."""

    name: str = "job"
    first_line: str = "1 rank"
    max_restarts: int = 0

    @staticmethod
    def unreported_end() -> tuple[int, list[str]]:
        return 0, []


def test_nodes_are_compared_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    screen = Screen(RankStreams({0: 3}, {}, (), several=False), Job())  # type: ignore[arg-type]
    for host, exchange in (("gpu-1", 0.6), ("gpu-2", 0.1)):
        pace = {"rank": 5, "exchange": exchange, "others": exchange, "part": "loading", "line": "train.py:5"}
        spent = {"host": host, "ranks": 4, "pace": pace, "parts": {"exchange": exchange}, "still": {}, "lines": {}}
        screen.show(Event("spent", {"spent": spent, "causes": [f"{host} is slow", "all wait"]}))
    screen.close()
    *_, first, both, second, third = capfd.readouterr().err.splitlines()
    assert (first, both, second) == ("paceline: gpu-1 is slow", "paceline: all wait", "paceline: gpu-2 is slow")
    assert "wait for those on gpu-2, of which rank 5 is at train.py:5 (loading)" in third


def test_what_paceline_says_does_not_command_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    screen = Screen(RankStreams({0: 3}, {}, (), several=False), Job())  # type: ignore[arg-type]
    failure = {
        "rank": 0, "message": "ValueError: \x1b]0;title\x07 \x9b2J", "traceback": "", "has_traceback": False, "node": 0,
        "host": "h", "pid": 1, "exit_code": 1, "log": "rank-0.log",
    }  # fmt: skip
    screen.show(Event("note", {"why": "\x1b[2J"}))
    screen.show(Event("finished", {"state": "FAILED", "exit_code": 1, "failure": failure, "others": []}))
    err = capfd.readouterr().err
    assert r"rank 0 failed first: ValueError: \x1b]0;title\x07 \x9b2J (node 0" in err
    assert r"paceline: \x1b[2J" in err
    assert err.replace("\n", "").isprintable()


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


def test_only_after_ctrl_c_another_one_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    screen = Screen(RankStreams({0: 3}, {}, (), several=False), Job())  # type: ignore[arg-type]
    screen.show(Event("stopping", {"signal": signal.SIGINT, "grace": 30.0}))
    screen.show(Event("stopping", {"signal": signal.SIGTERM, "grace": 30.0}))
    assert capfd.readouterr().err.splitlines()[1:] == [
        "paceline: stopping (SIGINT); ranks have 30 s, Ctrl-C again ends them at once",
        "paceline: stopping (SIGTERM); ranks have 30 s",
    ]


def test_a_terminal_is_told_what_is_imported(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda it=is_terminal: it)
        screen = Screen(RankStreams({0: 3}, {}, (), several=False), Job())  # type: ignore[arg-type]
        screen.show(Event("importing", {"what": ["torch"]}))
        said = capfd.readouterr().err.splitlines()[1:]
        assert said == (["paceline: importing torch …"] if is_terminal else [])
        screen.show(Event("imported", {"seconds": 1.0}))


def test_a_slow_import_is_said_in_a_pipe_too(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.cli.terminal.screen._SLOW_IMPORT", 0.01)
    screen = Screen(RankStreams({0: 3}, {}, (), several=False), Job())  # type: ignore[arg-type]
    screen.show(Event("importing", {"what": ["torch"]}))
    said = ""
    while "importing torch …" not in said:
        said += capfd.readouterr().err
    monkeypatch.setattr("paceline.cli.terminal.screen._SLOW_IMPORT", 60.0)
    for event in (
        Event("imported", {"seconds": 1.0}),
        Event("finished", {"state": "SUCCEEDED", "exit_code": 0, "took": 1.0}),
    ):
        screen.show(Event("importing", {"what": ["torch"]}))
        screen.show(event)
    assert not [it for it in threading.enumerate() if isinstance(it, threading.Timer) and not it.finished.is_set()]
