"""Jobs of the last version, which recorded events.jsonl and a status.json that is no cache of a journal."""

from __future__ import annotations

import fcntl
import json
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests import recorded
from tests.conftest import GENEROUS
from tests.typed import refusal

if TYPE_CHECKING:
    from tests.conftest import Paceline


def shown(paceline: Paceline, *args: str) -> Any:
    return paceline.json(*args)


def test_a_job_that_has_ended(paceline: Paceline) -> None:
    recorded.ended(paceline, "old")
    for job in (shown(paceline, "get", "old"), *shown(paceline, "list")):
        assert (job["state"], job["exit_code"], job["error"], job["cause"]) == ("SUCCEEDED", 0, None, None)
        assert [rank["state"] for rank in job["instances"]] == ["SUCCEEDED"] * 2
    assert [event["event"] for event in shown(paceline, "events", "old")] == ["submitted", "started", "finished"]
    assert paceline("logs", "-f", "old").stdout == "hello from 0\n"
    assert paceline("wait", "old").returncode == 0
    assert "had ended already" in paceline("stop", "old").stderr
    paceline.script("print('again')")
    assert paceline("resubmit", "old").stdout == "old-2\n"
    assert paceline("wait", "old-2").returncode == 0
    assert paceline("delete", "old").returncode == 0


def test_a_job_that_runs(paceline: Paceline) -> None:
    agent = recorded.running(paceline, "old")
    job = shown(paceline, "get", "old")
    assert (job["state"], job["exit_code"], job["finished"]) == ("RUNNING", None, None)
    assert [rank["state"] for rank in job["instances"]] == ["RUNNING"] * 2
    following = paceline.start("logs", "-f", "old")
    assert following.stdout is not None
    assert following.stdout.readline() == "hello from 0\n"
    waiting = paceline.start("wait", "old")
    assert waiting.stderr is not None
    waiting.stderr.readline()
    paceline.succeeds("stop", "old")
    assert agent.wait(GENEROUS) == 0
    assert following.communicate(timeout=GENEROUS)[0] == "goodbye\n"
    waiting.communicate(timeout=GENEROUS)
    job = shown(paceline, "get", "old")
    assert (job["state"], job["exit_code"]) == ("STOPPED", 143)
    assert [event["event"] for event in shown(paceline, "events", "old")] == [
        "submitted",
        "started",
        "stopping",
        "finished",
    ]
    paceline.script("print('again')")
    assert paceline("resubmit", "old").stdout == "old-2\n"
    assert paceline("wait", "old-2").returncode == 0


@pytest.mark.parametrize("is_recorded", [False, True])
def test_the_agent_of_a_job_was_killed(paceline: Paceline, is_recorded: bool) -> None:
    agent = recorded.running(paceline, "old")
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    if is_recorded:  # the disk was full, so the status could not be written
        with open(paceline.home / "jobs" / "old" / "events.jsonl", "a") as events:
            failure = {"rank": 1, "message": "ValueError"}
            end = {"state": "FAILED", "exit_code": 7, "failure": failure, "others": []}
            events.write(json.dumps({"time": time.time(), "event": "finished", **end}) + "\n")
    job = shown(paceline, "get", "old")
    assert (job["state"], job["exit_code"]) == ("FAILED", 7 if is_recorded else None)
    assert [rank["state"] for rank in job["instances"]] == ["FAILED"] * 2
    if is_recorded:
        assert job["error"] == "rank 1: ValueError"
    else:
        assert job["error"].startswith(f"its agent (pid {agent.pid} on {socket.gethostname()}) was killed")
        assert job["cause"] == "agent"


@pytest.mark.parametrize(("runs", "state"), [(True, "RUNNING"), (False, "LOST")])
def test_a_job_of_a_newer_version(paceline: Paceline, runs: bool, state: str) -> None:
    recorded.ended(paceline, "new")
    folder = paceline.home / "jobs" / "new"
    (folder / "events.jsonl").unlink()
    (folder / "status.json").write_text('{"v": 2, "journal": 60, "condition": "fine"}')
    (folder / "journal.jsonl").write_text('{"time": 1.0, "v": 2, "event": "state", "condition": "fine"}\n')
    said = "it was written by a newer version of paceline; update paceline here to see how it is"
    with open(folder / "lock") as lock:
        if runs:
            fcntl.flock(lock, fcntl.LOCK_EX)
        job = shown(paceline, "get", "new")
        assert (job["state"], job["error"], job["command"][-9:]) == (state, said, "script.py")
        if runs:
            refused = refusal(paceline, "stop", "new")
            assert refused == f"job new cannot be stopped here: {said}"
    (folder / "status.json").unlink()  # which this version cannot check
