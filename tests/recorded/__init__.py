"""The folder of a job of two ranks, as paceline wrote it before there was a journal: for tests of what reads it."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conftest import Paceline

_JOB = Path(__file__).with_name("job")
_BEGAN = 1795529562  # the second in which all of it happened


def ended(paceline: Paceline, *names: str) -> None:
    """Jobs `python script.py` that have ended just now, each submitted after the one before."""
    for number, name in enumerate(names):
        path = paceline.home / "jobs" / name
        words = {
            "@NAME@": name, "@ID@": secrets.token_hex(16), "@HOME@": str(paceline.home), "@PYTHON@": sys.executable,
            "@FOLDER@": str(paceline.folder), str(_BEGAN): str(int(time.time()) - 1 - len(names) + number),
        }  # fmt: skip
        for source in _JOB.rglob("*"):
            if source.is_file():
                text = source.read_text()
                for placeholder, value in words.items():
                    text = text.replace(placeholder, value)
                target = path / source.relative_to(_JOB)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text)
        (path / "errors" / "0").mkdir(parents=True)
        path.chmod(0o700)
    paceline.home.chmod(0o700)


def running(paceline: Paceline, name: str) -> subprocess.Popen[str]:
    """A job that runs until it is stopped; returns its agent."""
    ended(paceline, name)
    path = paceline.home / "jobs" / name
    events = (path / "events.jsonl").read_text().splitlines(keepends=True)
    (path / "events.jsonl").write_text("".join(line for line in events if '"finished"' not in line))
    command = [sys.executable, str(_JOB.with_name("agent.py")), str(path)]
    agent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=paceline.env)
    assert agent.stdout is not None
    assert agent.stdout.readline() == "running\n"
    return agent
