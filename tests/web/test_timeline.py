"""The bar of time of a job: every way through its states, with few events and with very many."""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.backends.story import story
from paceline.web.timeline import Timeline, timeline

from .long_job import START
from .test_report import JOB

RUNNING = dataclasses.replace(JOB, state="RUNNING", created=START, finished=None, exit_code=None, error=None)
OVER = dataclasses.replace(JOB, state="SUCCEEDED", created=START, finished=START + 100, exit_code=0, error=None)


def event(at: float, name: str, **more: Any) -> dict[str, Any]:
    return {"time": START + at, "event": name, **more}


def bar(job: Any, *events: dict[str, Any], now: float = 100) -> Timeline:
    return timeline(job, story(job, events), START + now)


def parts(found: Timeline) -> list[tuple[str, float, float]]:
    return [(it["kind"], it["at"], it["seconds"]) for it in found["parts"]]


def test_a_job_that_waited_imported_and_was_started_again() -> None:
    found = bar(
        OVER, event(0, "queued", need=2, ahead=1), event(10, "granted", devices=["0"]), event(10, "importing", what=[]),
        event(11, "started", attempt=0), event(15, "imported", seconds=5), event(30, "checkpoint", step=7),
        event(40, "restarting", attempt=1, restarts=1, why="a node was lost"), event(44, "started", attempt=1),
        event(100, "finished", state="SUCCEEDED", exit_code=0),
    )  # fmt: skip
    assert parts(found) == [
        ("waiting", 0, 10), ("starting", 10, 5), ("running", 15, 25), ("starting", 40, 4), ("running", 44, 56)
    ]  # fmt: skip
    assert [(it["kind"], it["at"], it["about"]) for it in found["marks"]] == [
        ("checkpoint", 30, "7"), ("restart", 40, "a node was lost")
    ]  # fmt: skip
    assert found["totals"] == {"waiting": 10, "starting": 9, "running": 81}
    assert (found["attempts"], found["seconds"], found["is_over"]) == (2, 100, True)


def test_hosts_that_tell_the_same() -> None:
    """Each host has its own events; one that has left ends nothing."""
    both = [
        event(at + late, name, host=host, **more)
        for host, late in (("a", 0), ("b", 0.5))
        for at, name, more in ((1, "importing", {"what": []}), (1, "started", {"attempt": 0}), (3, "imported", {}),
                               (50, "restarting", {"attempt": 1, "restarts": 1, "why": "it"}),
                               (51, "started", {"attempt": 1}))
    ]  # fmt: skip
    left = event(60, "finished", host="b", state="STOPPED", exit_code=0)
    found = bar(RUNNING, *both, left, event(70, "checkpoint", host="a", step=1))
    assert parts(found) == [
        ("waiting", 0, 1), ("starting", 1, 2.5), ("running", 3.5, 46.5), ("starting", 50, 1), ("running", 51, 49)
    ]  # fmt: skip
    assert found["counts"] == {"restart": 1, "checkpoint": 1}


def test_a_job_that_hung_was_suspended_and_went_on() -> None:
    hang = {"seconds": 10.0, "line": "rank 1"}
    begin = [event(0, "started", attempt=0), event(30, "hang", why="", hang=hang)]
    assert parts(bar(RUNNING, *begin)) == [("running", 0, 20), ("hung", 20, 10), ("running", 30, 70)]
    hangs = dataclasses.replace(RUNNING, waiting="it hangs: rank 1")
    assert parts(bar(hangs, *begin)) == [("running", 0, 20), ("hung", 20, 80)]
    killed = dataclasses.replace(OVER, state="FAILED")
    assert parts(bar(killed, *begin)) == [("running", 0, 20), ("hung", 20, 80)]
    more = [event(40, "suspended", attempt=1), event(60, "resuming", attempt=1), event(65, "started", attempt=1)]
    assert parts(bar(RUNNING, *begin, *more))[1:] == [
        ("hung", 20, 20), ("suspended", 40, 20), ("waiting", 60, 5), ("running", 65, 35)
    ]  # fmt: skip


def test_jobs_of_which_little_is_known() -> None:
    """One that waits, one whose record has no events, one that is lost, and one that ended at once."""
    waits = dataclasses.replace(RUNNING, state="PENDING", started=None)
    assert parts(bar(waits)) == [("waiting", 0, 100)]
    silent = dataclasses.replace(OVER, started=START + 20)
    assert parts(bar(silent)) == [("waiting", 0, 20), ("running", 20, 80)]
    lost = dataclasses.replace(RUNNING, state="LOST", started=None)
    assert parts(bar(lost, event(5, "started", attempt=0), event(40, "checkpoint", step=1))) == [
        ("waiting", 0, 5), ("running", 5, 35), ("unknown", 40, 60)
    ]  # fmt: skip
    at_once = dataclasses.replace(OVER, started=None, finished=START)
    assert (parts(bar(at_once)), bar(at_once)["marks"]) == ([], [])


def test_a_requeued_job_waits_between_its_ends() -> None:
    found = bar(
        RUNNING, event(1, "started", attempt=0), event(40, "finished", state="STOPPED", exit_code=143),
        event(70, "started", attempt=1),
    )  # fmt: skip
    assert parts(found) == [("waiting", 0, 1), ("running", 1, 39), ("waiting", 40, 30), ("running", 70, 30)]


def test_very_many_marks_and_parts() -> None:
    """What nobody could tell apart is one mark, which counts the others."""
    events = [event(0.01 * it, "checkpoint", step=it) for it in range(9000)]
    for it in range(2000):
        events.append(event(0.045 * it, "restarting", attempt=it + 1, restarts=it + 1, why="x"))
        events.append(event(0.045 * it + 0.02, "started", attempt=it + 1))
    found = bar(OVER, *sorted(events, key=lambda it: it["time"]))
    assert found["counts"] == {"checkpoint": 9000, "restart": 2000}
    assert len(found["parts"]) < 200
    assert len(found["marks"]) < 300
    assert sum(it["count"] for it in found["marks"]) == 11000
    assert abs(sum(it["seconds"] for it in found["parts"]) - 100) < 0.1
