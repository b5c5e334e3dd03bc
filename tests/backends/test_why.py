"""Why a job failed, and what happened to it, in words."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.backends.story import sentence
from paceline.backends.why import explained
from paceline.job.job import Job

JOB = Job("it", "FAILED", "local", "torch", 1, 5, 0, 1, 100.0, 101.0, 109.0, (), None)


def failure(rank: int | None, message: str = "ValueError: no", line: int = 7) -> dict[str, Any]:
    """As a node tells of it; torch puts the rank before each line."""
    text = "".join(f"[rank{rank}]: {it}\n" for it in ("Traceback:", f'  File "train.py", line {line}', message))
    text = "" if rank is None else text  # a node has none
    return {"rank": rank, "node": 1, "host": "vm", "message": message, "traceback": text, "collectives": ""}


def test_ranks_that_say_the_same_are_told_once() -> None:
    others = [failure(1), failure(4, line=9), failure(2), failure(3, line=9), failure(None, "it was lost")]
    end = {"time": 109.0, "event": "finished", "state": "FAILED", "failure": failure(0), "others": others}
    lines = explained(JOB, [end])
    assert [line for line in lines if "after it" in line] == [
        "  after it ranks 1, 2: the same", "  after it ranks 3, 4: ValueError: no", "  after it node 1: it was lost"
    ]  # fmt: skip
    assert sum("line 7" in line for line in lines) == 1
    assert sum("line 9" in line for line in lines) == 1


def test_of_other_ranks_the_last_lines_are_enough() -> None:
    """Nodes send no more of them; other last lines are told."""
    whole = failure(0)
    others = [{**failure(rank), "traceback": "\n".join(failure(rank, line=line)["traceback"].splitlines()[1:])}
              for rank, line in ((1, 7), (2, 9))]  # fmt: skip
    lines = explained(
        JOB, [{"time": 109.0, "event": "finished", "state": "FAILED", "failure": whole, "others": others}]
    )
    assert [line for line in lines if "after it" in line] == [
        "  after it rank 1: the same", "  after it rank 2: ValueError: no"
    ]  # fmt: skip


def test_of_very_many_failures_the_messages_are_enough() -> None:
    others = [failure(1), {"rank": 2, "node": 1, "message": "ValueError: no"}]
    lines = explained(
        JOB, [{"time": 109.0, "event": "finished", "state": "FAILED", "failure": failure(0), "others": others}]
    )
    assert [line for line in lines if "after it" in line] == ["  after it ranks 1, 2: the same"]


def test_a_rank_that_had_ended_was_not_stopped() -> None:
    place = {"hosts": ["vm"], "pids": [7], "devices": [], "stack": [], "threads": []}
    places = [{**place, "ranks": [1], "where": "", "why": "it has ended"}]
    stacks = {"time": 108.0, "event": "stacks", "places": places}
    assert explained(JOB, [stacks])[1:] == []
    places.append({**place, "ranks": [2], "where": "train.py:7 in load", "why": ""})
    assert explained(JOB, [stacks])[-1] == "rank 2 on vm (pid 7): train.py:7 in load"


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"event": "started", "world_size": 4, "attempt": 0}, ("{world_size} began", {"world_size": "4 ranks"})),
        ({"event": "importing", "what": ["torch", "numpy"]}, ("imports {what}", {"what": "torch,numpy"})),
        ({"event": "stopping", "signal": 15, "grace": 30.0}, ("is asked to stop by {signal}", {"signal": "SIGTERM"})),
        ({"event": "restarting", "restarts": 1, "why": None, "failure": failure(2)},
         ("begins again, restart {restarts}: {why}", {"restarts": "1", "why": "rank 2 on vm: ValueError: no"})),
        ({"event": "submitted", "ranks": 1, "nodes": 2},
         ("submitted: {ranks}, {nodes}", {"ranks": "1 rank", "nodes": "2 nodes"})),
        ({"event": "spent", "spent": {"parts": {"data": 0.6}}}, ("time: {spent}", {"spent": "data 60 %"})),
        ({"event": "started"}, None),  # of a job whose nodes have recorded nothing
        ({"event": "reopened"}, None),
    ],
)  # fmt: skip
def test_an_event_in_a_sentence(event: dict[str, Any], said: Any) -> None:
    assert sentence(event) == said
