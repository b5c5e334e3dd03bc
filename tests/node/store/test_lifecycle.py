"""Several jobs are stopped or suspended together: one that cannot be keeps no other one from it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from paceline.node.errors import Refused
from paceline.node.host import commands
from paceline.node.journal.state import cached
from paceline.node.machine import processes
from paceline.node.rundir.directory import RunDirectory
from paceline.node.store import lifecycle, records
from paceline.node.store.home import Home

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A machine with two jobs whose agent cannot be told anything: of a newer version, and one that never came."""
    it = Home(tmp_path, tmp_path / "jobs")
    newer, silent = (job(it, name) for name in ("newer", "silent"))
    newer.journal.write_text(json.dumps({"v": 1000, "event": "made", "time": 0.0}) + "\n")
    with silent.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield it


def job(home: Home, name: str, agent: subprocess.Popen[bytes] | None = None) -> RunDirectory:
    """A job with this process in the place of its agent."""
    run = RunDirectory(home.jobs / name)
    run.path.mkdir(parents=True)
    run.spec.write_text("{}")
    run.mark()
    if agent is not None:
        who: Any = {
            "pid": agent.pid, "start_time": processes.start_time(agent.pid), "boot": processes.boot_id(),
            "host": os.uname().nodename,
        }  # fmt: skip
        run.status.write_text(json.dumps(cached({"state": "RUNNING", "agent": who}, 0)))
    return run


@contextlib.contextmanager
def agents(home: Home, *names: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    before = signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # in the background of a shell it is ignored
    started = [subprocess.Popen(["sleep", "1000"]) for _ in names]
    signal.signal(signal.SIGQUIT, before)
    try:
        for name, agent in zip(names, started, strict=True):
            job(home, name, agent)
        yield started
    finally:
        for agent in started:
            agent.kill()
            agent.wait()


@pytest.mark.parametrize("now", [False, True])
def test_jobs_are_stopped_although_others_refuse(home: Home, monkeypatch: pytest.MonkeyPatch, now: bool) -> None:
    monkeypatch.setattr(lifecycle, "_AGENT_COMES", 0.0)
    with agents(home, "a", "b") as started:
        with pytest.raises(Refused) as refused:
            commands.stop(home, {"do": "stop", "names": ["newer", "silent", "a", "b"], "now": now})
        number = signal.SIGQUIT if now else signal.SIGTERM
        assert [agent.wait(60) for agent in started] == [-number, -number]
    newer, silent = str(refused.value).split("; ", 1)
    assert newer.startswith("job newer cannot be stopped here: ")
    assert silent.endswith(f"the agent of job silent does not answer; see {home.jobs}/silent/agent.log")


def test_all_are_told_before_one_is_waited_for(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    send = records.signal_agent
    monkeypatch.setattr(records, "signal_agent", lambda path, numbers: done.append(path.name) or send(path, numbers))
    monkeypatch.setattr(lifecycle, "_wait", lambda run, seconds: done.append("waits") or True)
    with agents(home, "a", "b"):
        commands.stop(home, {"do": "stop", "names": ["a", "b"], "now": True})
    assert done[:3] == ["a", "b", "waits"]


def test_what_does_not_know_suspend_keeps_no_other_one_from_it(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_wait", lambda run, seconds: False)
    monkeypatch.setattr(processes, "handles", lambda pid, number: pid != old.pid)
    with agents(home, "old", "new") as (old, new):
        with pytest.raises(Refused, match="job old was started by an older version") as refused:
            commands.suspend(home, {"do": "suspend", "names": ["old", "new"], "resumes": False})
        assert new.wait(60) == -lifecycle.SUSPEND
        assert old.poll() is None
    assert "job new" not in str(refused.value)
