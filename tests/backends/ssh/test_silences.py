"""What is remembered of hosts that did not answer, by several processes in one file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.backends.remote.connection import Host, Silent
from paceline.backends.ssh.asking import Outcome
from paceline.backends.ssh.target import Silences

A, B, C = (Host(name, 0, None, None, "python3", "/root") for name in "abc")
BACK = Outcome({}, 0.1)
GONE = Outcome(Silent("no answer within 5 s"), 5.0)


def process(*silent: Host) -> Silences:
    """What a process knows, after these hosts did not answer it."""
    found = Silences()
    found.note(dict.fromkeys(silent, GONE), dict.fromkeys(silent, 5.0))
    return found


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    return tmp_path / "silent.json"


def test_a_host_that_is_back_is_not_said_to_be_silent_any_more(noted: Path) -> None:
    process(A, B).note({A: BACK}, {})
    assert json.loads(noted.read_text()).keys() == {"b"}
    later = Silences()
    assert (later.before(A), later.before(B)) == (0.0, 5.0)


def test_what_other_processes_have_noted_meanwhile_stays(noted: Path) -> None:
    first = process(A)
    process(B)
    first.note({A: BACK}, {})
    assert json.loads(noted.read_text()).keys() == {"b"}
    first.note({C: GONE}, {C: 5.0})
    assert json.loads(noted.read_text()).keys() == {"b", "c"}
