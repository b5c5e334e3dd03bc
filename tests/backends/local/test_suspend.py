"""Suspended jobs give their devices back, and keep their place in the queue of the machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.conftest import eventually

if TYPE_CHECKING:
    from tests.conftest import Paceline

FOREVER = "import threading; threading.Event().wait()"


def job(paceline: Paceline, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(paceline.succeeds("get", name, "-o", "json").stdout)
    return found


def reaches(paceline: Paceline, name: str, state: str) -> None:
    eventually(lambda: job(paceline, name)["state"] == state, lambda: f"{state}; {job(paceline, name)}", 0.2)


def waits(paceline: Paceline, name: str, why: str) -> None:
    """Wait until it is said why a job waits."""
    eventually(lambda: why in (job(paceline, name)["waiting"] or ""), lambda: f"waits; {job(paceline, name)}", 0.2)


def test_devices_are_given_back_and_the_place_is_kept(paceline: Paceline) -> None:
    (paceline.folder / "paceline.toml").write_text("[local]\ndevices = 1\n")
    script = paceline.script(FOREVER)

    def submit(name: str) -> None:
        paceline.succeeds("submit", "--name", name, "--gpus", "1", script)

    submit("first")
    reaches(paceline, "first", "RUNNING")
    submit("second")
    waits(paceline, "second", "held by: first")
    paceline.succeeds("suspend", "first")
    assert job(paceline, "first")["devices"] == []
    reaches(paceline, "second", "RUNNING")
    submit("third")
    paceline.succeeds("resume", "first")
    waits(paceline, "first", "held by: second")
    waits(paceline, "third", "1 job ahead")
    assert "job third is suspended; it had not begun; " in paceline.succeeds("suspend", "third").stderr
    assert job(paceline, "third")["state"] == "SUSPENDED"
    paceline.succeeds("resume", "third")
    waits(paceline, "third", "1 job ahead")
    paceline.succeeds("stop", "second")
    reaches(paceline, "first", "RUNNING")
    assert job(paceline, "third")["state"] == "PENDING"
    events = [event["event"] for event in json.loads(paceline.succeeds("events", "first", "-o", "json").stdout)]
    assert [it for it in events if it in ("granted", "suspended", "resuming", "started")] == [
        "granted", "started", "suspended", "resuming", "granted", "started",
    ]  # fmt: skip
    paceline.succeeds("suspend", "third")
    paceline.succeeds("stop", "first", "third")
    assert (job(paceline, "third")["state"], job(paceline, "third")["started"]) == ("STOPPED", None)


def test_one_that_is_resumed_before_it_has_saved_goes_on(paceline: Paceline) -> None:
    script = paceline.script("""
        import os, pathlib, signal, sys, time
        def save(*_):
            print("saves", flush=True)
            while not pathlib.Path("saved").exists():
                time.sleep(0.01)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("here", flush=True)
        while True:
            signal.pause()
    """)
    logs = lambda: "".join(path.read_text() for path in paceline.home.glob("jobs/it/logs/*/*.log"))  # noqa: E731
    paceline.succeeds("submit", "--name", "it", script)
    eventually(lambda: "here" in logs(), "it runs")
    paceline.succeeds("suspend", "--no-wait", "it")
    eventually(lambda: "saves" in logs(), "it saves")
    resumed = paceline.succeeds("resume", "it")
    assert "job it is not suspended; it is RUNNING\n" in resumed.stderr, resumed.stderr
    (paceline.folder / "saved").touch()
    eventually(lambda: logs().count("here") == 2, lambda: f"it goes on; {job(paceline, 'it')}")
    paceline.succeeds("stop", "it")


def test_one_that_was_just_submitted_is_suspended_and_nobody_waits_for_it_unsaid(paceline: Paceline) -> None:
    paceline.succeeds("submit", "--name", "it", "-n", "1", paceline.script(FOREVER))
    paceline.succeeds("suspend", "it")
    found = job(paceline, "it")
    assert (found["state"], found["facts"]["mend"]["command"]) == ("SUSPENDED", None), found
    assert "with paceline resume it" in found["facts"]["mend"]["do"]
    waited = paceline("wait", "it", "--timeout", "1s")
    assert "job it is suspended; paceline resume it lets it go on\n" in waited.stderr, waited.stderr
    paceline.succeeds("stop", "it")


def test_an_agent_that_does_not_know_the_signal_is_not_ended_by_it(paceline: Paceline) -> None:
    """It is of an older version; another process has its place here."""
    import subprocess

    from paceline.node.machine import processes

    paceline.succeeds("submit", "--name", "old", "-n", "1", paceline.script(FOREVER))
    reaches(paceline, "old", "RUNNING")
    status = next(paceline.home.glob("jobs/old/status.json"))
    stored = json.loads(status.read_text())
    agent = stored["agent"]
    with subprocess.Popen(["sleep", "1000"]) as other:
        start = processes.start_time(other.pid)
        status.write_text(json.dumps({**stored, "agent": {**agent, "pid": other.pid, "start_time": start}}))
        refused = paceline("suspend", "old")
        assert other.poll() is None
        other.kill()
    assert refused.returncode == 2 and "older version of paceline" in refused.stderr, refused.stderr
    status.write_text(json.dumps(stored))
    paceline.succeeds("stop", "old")
