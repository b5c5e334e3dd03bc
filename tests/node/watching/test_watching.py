"""Hangs are named, slow scripts are left alone, and what makes them slow is said: real jobs, seen by their agents."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import eventually
from tests.node.watching import slowing
from tests.node.watching.hanging import HANGS, PRELUDE, SLOW

from paceline.node.journal.records import read

if TYPE_CHECKING:
    from tests.conftest import Paceline

IN_GATE = ("another branch", "horovod", "worker of a loader", "interpreter's lock")


def hangs(paceline: Paceline) -> list[Any]:
    """The hangs that the agent of job `it` has recorded."""
    found, _ = read(paceline.home / "jobs" / "it" / "journal.jsonl")
    return [record["hang"] for record in found if record["event"] == "hang"]


def marked(cases: dict[str, Any], *, in_gate: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in in_gate else pytest.mark.nightly) for name in cases]


@pytest.mark.parametrize("name", marked(HANGS, in_gate=IN_GATE))
def test_a_hang_is_named(paceline: Paceline, name: str) -> None:
    ranks, script, to_blame, words = HANGS[name]
    (paceline.folder / "script.py").write_text(PRELUDE + script)
    paceline.succeeds("submit", "--name", "it", "-n", str(ranks), "--hang-after", "3s", "script.py")
    eventually(lambda: hangs(paceline), "a hang is seen")
    found = hangs(paceline)[0]
    paceline("stop", "--now", "it")
    assert found["ranks"] == to_blame, found["line"]
    assert re.search(words, found["line"]), found["line"]


def test_a_hang_is_no_slow_step(paceline: Paceline) -> None:
    (paceline.folder / "script.py").write_text(PRELUDE + "if join() == 1:\n    time.sleep(8)\ndist.all_reduce(t)\n")
    paceline.succeeds("run", "--name", "it", "-n", "2", "--hang-after", "1s", "script.py")
    assert hangs(paceline)
    assert paceline.json("get", "it")["slow"] == []


@pytest.mark.parametrize("name", marked(SLOW, in_gate=("downloads slowly",)))
def test_a_slow_script_is_left_alone(paceline: Paceline, name: str) -> None:
    ranks, script = SLOW[name]
    (paceline.folder / "script.py").write_text(PRELUDE + script)
    paceline.succeeds("run", "--name", "it", "-n", str(ranks), "--hang-after", "3s", "script.py")
    assert not hangs(paceline), hangs(paceline)[0]["line"]


@pytest.mark.parametrize("name", marked(slowing.CAUSES, in_gate=("data, with the library", "a slow rank")))
def test_what_makes_a_job_slow_is_said(paceline: Paceline, name: str) -> None:
    ranks, script, words = slowing.CAUSES[name]
    (paceline.folder / "script.py").write_text(slowing.PRELUDE + script)
    done = paceline.succeeds("run", "--name", "it", "-n", str(ranks), "--hang-after", "1s", "script.py")
    for told in (done.stderr, paceline("get", "it").stdout, paceline("why", "it").stdout):
        assert re.search(words, told), told
