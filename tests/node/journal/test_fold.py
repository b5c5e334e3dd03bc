"""The state of a job, from random histories of its nodes and random reports of its scheduler."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples

from paceline.node.journal.fold import Scheduler, fold, is_over, part_of
from paceline.node.journal.state import FINAL, reduce

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.contract.records import JobFacts, JobRecord, Part

JOB: JobFacts = {
    "name": "job", "backend": "local", "framework": "torch", "nodes": 2, "ranks": 2, "created": 1.0, "max_restarts": 2,
    "devices_asked": None, "resume_from": None, "priority": 0, "queue": None, "labels": {}, "options": {}, "ttl": None,
    "grace": 30.0, "command": "train.py", "working_dir": "/", "folder": "/jobs/job", "code": None, "data": [],
    "tensorboard": None,
}  # fmt: skip
DEAD = "its agent (pid 7) was killed"


def many(test: Callable[..., None]) -> Callable[..., None]:
    """The test with a hundred cases, and with ten thousand at night."""
    with_cases = settings(max_examples=examples(100, 10_000), deadline=None)(test)
    return pytest.mark.soak(pytest.mark.timeout(3600)(with_cases))


def rank(number: int, state: str) -> dict[str, Any]:
    return {"name": f"job-{number}", "rank": number, "local_rank": 0, "node": number, "state": state, "pid": 7,
            "exit_code": None, "log": ""}  # fmt: skip


def part(node: int = 0, alive: bool | None = True, *, is_elastic: bool = False, nodes: int = 2, **status: Any) -> Part:
    """A part of a job that has recorded this."""
    start = {"attempt": status.get("attempt", 0)}
    begun = {"start": start, "nodes": nodes, "node_rank": node, "ranks": [rank(node, "RUNNING")]}
    recorded = {**begun, "created": 1.0, **status} if status else {}
    return part_of(
        cast("Any", recorded), alive=alive, host=f"host{node}", why="" if alive else DEAD, written=9.0,
        is_elastic=is_elastic,
    )  # fmt: skip


def test_the_node_that_the_others_wait_for_is_named_first() -> None:
    def waits(share: float, host: str) -> dict[str, Any]:
        return {"rank": 0, "exchange": share, "others": share, "part": "backward", "line": "train.py:5", "host": host,
                "ranks": 1, "is_named": False, "seen": "it swaps 5 MB/s"}  # fmt: skip

    parts = [
        part(0, state="RUNNING", pace=waits(0.6, "a"), slow=["logs"]),
        part(1, state="RUNNING", pace=waits(0.1, "b")),
    ]
    line, other = fold(JOB, parts)["slow"]
    assert line.startswith(
        "60 % of the time ranks on other nodes wait for those on b, of which rank 0 is at train.py:5"
    )
    assert line.endswith("look at this host: it swaps 5 MB/s")
    assert other == "logs"
    parts[1]["pace"] = None
    assert fold(JOB, parts)["slow"] == ["logs"]


def test_an_elastic_job_runs_as_long_as_a_node_of_it_does() -> None:
    ended = part(0, is_elastic=True, state="SUCCEEDED", exit_code=0, finished=5.0)
    assert fold(JOB, [ended, part(1, is_elastic=True, state="RUNNING")])["state"] == "RUNNING"


def test_a_suspended_job_is_resumed_also_if_a_node_of_it_is_gone() -> None:
    idle = {"is_elastic": True, "state": "SUSPENDED"}
    parts = [part(0, **idle), part(1, alive=False, **idle)]
    parts[0]["waiting"] = "paceline resume it lets it go on"
    found = fold(JOB, parts)
    assert (found["state"], found["error"], found["waiting"]) == ("SUSPENDED", None, parts[0]["waiting"])


def failed(message: str, number: int | None = None, cause: str | None = None, code: int = 1) -> dict[str, Any]:
    """The status of a part of a failed job."""
    failure = {"rank": number, "node": 0, "message": message, "cause": cause}
    return {"state": "FAILED", "exit_code": code, "finished": 5.0, "failure": failure}


# -- random histories --------------------------------------------------------------------------------------------------

_CODES = {"SUCCEEDED": 0, "FAILED": 1, "STOPPED": 143}


def changed(**status: Any) -> dict[str, Any]:
    """The record of a change of the status."""
    return {"event": "state", "status": status}


@st.composite
def histories(draw: st.DrawFn, *, can_be_elastic: bool = True) -> tuple[list[list[dict[str, Any]]], str, bool]:
    """The journals of a job's nodes, how the job ends, and whether it is elastic."""
    nodes, attempts = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    end = draw(st.sampled_from(sorted(_CODES)))
    is_elastic = can_be_elastic and draw(st.booleans())
    found: list[list[dict[str, Any]]] = []
    for node in range(nodes):
        records: list[dict[str, Any]] = [changed(state="PENDING", ranks=[])] if draw(st.booleans()) else []
        for attempt in range(attempts):
            begun = {"start": {"attempt": attempt}, "attempt": attempt, "node_rank": node, "nodes": nodes}
            records.append(changed(state="RESTARTING" if attempt else "STARTING", attempt=attempt))
            records.append(changed(**begun, ranks=[rank(node, "STARTING")]))
            records.append({"event": "started", "attempt": attempt})
            records.append(changed(state="RUNNING", started=2.0))
            records.append({"event": "ranks", "ranks": [rank(node, "RUNNING")]})
        failure = {"rank": 0, "node": 0, "message": "ValueError", "cause": "exception"} if end == "FAILED" else None
        finished = {"state": end, "exit_code": _CODES[end], "failure": failure, "others": []}
        records.append({"event": "finished", "time": 5.0 + node, **finished})
        found.append(records)
    return found, end, is_elastic


def after(history: list[dict[str, Any]], count: int, alive: bool | None, *, is_elastic: bool = False) -> Part:
    """A part whose journal has so many records."""
    why = "" if alive else DEAD
    return part_of(
        reduce({}, cast("Any", history[:count])), alive=alive, host="host", why=why, written=4.0, is_elastic=is_elastic
    )


def draw_parts(data: st.DataObject) -> list[Part]:
    """The parts of a job at any moment: each node has recorded any prefix of its history, and some write no more."""
    changes, _, is_elastic = data.draw(histories())
    return [
        after(
            it, data.draw(st.integers(0, len(it))), data.draw(st.sampled_from([True, False, None])),
            is_elastic=is_elastic,
        )
        for it in changes if data.draw(st.booleans())
    ]  # fmt: skip


def schedulers() -> st.SearchStrategy[Scheduler | None]:
    """What a scheduler may report."""
    states = st.sampled_from(["queued", "running", "suspended", "restarting", "ended", "unreachable"])
    results = st.sampled_from([None, *FINAL])
    return st.none() | st.builds(
        Scheduler, cast("Any", states), st.sampled_from([None, "a reason"]), cast("Any", results),
        st.sampled_from([None, 3]), st.just(7.0),
    )  # fmt: skip


def check(record: JobRecord) -> None:
    """What is true of every record."""
    over = record["state"] in FINAL
    assert (record["finished"] is not None) == over
    assert over or (record["exit_code"] is None and record["kept_since"] is None)
    assert not over or record["waiting"] is None
    if record["state"] == "FAILED":
        assert record["exit_code"] != 0


@many
@given(st.data())
def test_a_state_is_consistent_whatever_is_recorded_and_reported(data: st.DataObject) -> None:
    parts, scheduler = draw_parts(data), data.draw(schedulers())
    check(fold(JOB, parts, scheduler))


@many
@given(st.data())
def test_a_job_runs_only_if_a_part_of_it_is_alive(data: st.DataObject) -> None:
    parts = draw_parts(data)
    record = fold(JOB, parts, data.draw(schedulers()))
    if record["state"] == "RUNNING":
        assert any(it["alive"] and it["state"] == "RUNNING" for it in parts)


@many
@given(st.data())
def test_the_order_in_which_nodes_answer_does_not_matter(data: st.DataObject) -> None:
    changes, _, is_elastic = data.draw(histories())
    parts = []
    for number, it in enumerate(changes):
        found = after(it, data.draw(st.integers(0, len(it))), data.draw(st.booleans()), is_elastic=is_elastic)
        parts.append({**found, "node_rank": number, "host": f"host{number}"})
    other = random.Random(data.draw(st.integers())).sample(parts, len(parts))
    scheduler = data.draw(schedulers())
    assert fold(JOB, cast("Any", parts), scheduler) == fold(JOB, cast("Any", other), scheduler)


@many
@given(st.data())
def test_a_job_that_has_ended_by_evidence_is_not_revived_by_what_hanging_nodes_record(data: st.DataObject) -> None:
    changes, _, _ = data.draw(histories(can_be_elastic=False))
    last = max(number for number, change in enumerate(changes[0]) if "start" in change.get("status", {}))
    counts = [data.draw(st.integers(last + 1, len(it))) for it in changes]
    counts[0] = len(changes[0])
    more = [data.draw(st.integers(count, len(it))) for count, it in zip(counts, changes, strict=True)]
    before, now = (
        fold(JOB, [after(it, count, True) for it, count in zip(changes, those, strict=True)])
        for those in (counts, more)
    )
    if before["state"] in FINAL:
        assert (now["state"], now["exit_code"]) == (before["state"], before["exit_code"])


@many
@given(st.data())
def test_a_job_has_the_end_that_its_nodes_recorded_although_some_were_killed_before(data: st.DataObject) -> None:
    changes, end, is_elastic = data.draw(histories())
    survivor = data.draw(st.integers(0, len(changes) - 1))
    attempt = max(number for number, change in enumerate(changes[0]) if "start" in change.get("status", {}))
    parts = [
        after(
            it,
            len(it) if node == survivor else data.draw(st.integers(attempt + 1, len(it))),
            alive=False,
            is_elastic=is_elastic,
        )
        for node, it in enumerate(changes)
    ]
    record = fold(JOB, parts)
    assert (record["state"], record["exit_code"]) == (end, _CODES[end])


@many
@given(st.data())
def test_a_job_all_of_whose_agents_are_gone_is_over(data: st.DataObject) -> None:
    changes, _, is_elastic = data.draw(histories())
    parts = [after(it, data.draw(st.integers(0, len(it))), alive=False, is_elastic=is_elastic) for it in changes]
    assert all(map(is_over, parts))
    record = fold(JOB, parts)
    assert record["state"] in FINAL
    assert not any(it["state"] in ("STARTING", "RUNNING") for it in record["instances"])


@many
@given(st.data())
def test_a_scheduler_that_decides_the_end_is_believed(data: st.DataObject) -> None:
    scheduler = data.draw(schedulers().filter(lambda it: it is not None and it.state == "ended"))
    assert scheduler is not None
    state = fold(JOB, draw_parts(data), scheduler)["state"]
    assert state in FINAL if scheduler.result is None else state == scheduler.result


# -- what a person would say -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([part(state="RUNNING")], "RUNNING"),
        ([part()], "PENDING"),  # its client holds the lock: the agent has not begun
        ([part(alive=None, state="RUNNING")], "LOST"),
        ([part(alive=False, state="RUNNING")], "FAILED"),
        ([part(alive=False)], "FAILED"),
        ([part(state="RUNNING"), part(1, state="STARTING")], "STARTING"),
        ([part(state="RUNNING"), part(1)], "STARTING"),
        ([part(state="PENDING"), part(1, state="STARTING")], "PENDING"),
        ([part(state="RESTARTING"), part(1, state="RUNNING")], "RESTARTING"),
        ([part(state="STOPPED", exit_code=143, finished=5.0), part(1, state="RUNNING")], "STOPPED"),  # node 1 hangs
        ([part(state="STOPPED", exit_code=143, finished=5.0, is_elastic=True),
          part(1, is_elastic=True, state="RUNNING")], "RUNNING"),  # node 0 has gone, and the job goes on
        ([part(is_elastic=True, state="RUNNING", nodes=1),
          part(1, is_elastic=True, state="STARTING", start=None)], "RUNNING"),  # node 1 is about to join
        ([part(is_elastic=True, state="RUNNING", nodes=1, attempt=1),
          part(1, is_elastic=True, state="RESTARTING")], "RUNNING"),  # node 1 was lost, and comes back
        ([part(is_elastic=True, state="RESTARTING", nodes=3, attempt=1, start={"attempt": 0}),  # it was cut off just
          *(part(node, is_elastic=True, state="RUNNING", attempt=1) for node in (1, 2))], "RUNNING"),  # before that
        ([part(alive=False, state="RUNNING"), part(1, state="SUCCEEDED", exit_code=0, finished=5.0)], "SUCCEEDED"),
        ([part(alive=False, is_elastic=True, state="RUNNING", nodes=1, attempt=1),  # node 1, about to join, knows it
          part(1, is_elastic=True, state="SUCCEEDED", start=None, exit_code=0, finished=5.0)], "SUCCEEDED"),
    ],
)  # fmt: skip
def test_the_state_of_a_job_without_a_scheduler(parts: list[Part], expected: str) -> None:
    record = fold(JOB, parts)
    check(record)
    assert record["state"] == expected


@pytest.mark.parametrize(
    ("parts", "scheduler", "expected"),
    [
        ([], Scheduler("queued", "waits for nodes"), ("PENDING", "waits for nodes", None)),
        ([], Scheduler("running", "its nodes start"), ("STARTING", "its nodes start", None)),
        ([], Scheduler("ended", "no node", "FAILED", 1, 5.0), ("FAILED", None, "no node")),
        ([part(state="RUNNING")], Scheduler("running"), ("RUNNING", None, None)),
        ([part(state="RUNNING")], Scheduler("suspended", "suspended"), ("RUNNING", "suspended", None)),
        ([part(alive=False, state="RUNNING")], Scheduler("suspended", "queue"), ("PENDING", "queue", None)),
        ([part(alive=False, state="RUNNING")], Scheduler("queued", "requeued"), ("RESTARTING", "requeued", None)),
        ([part(alive=False, **failed("ValueError", 1))], Scheduler("restarting", "lost a node"),
         ("RESTARTING", "lost a node", None)),
        ([part(**failed("node 1 is gone"))], Scheduler("running", "decides"),
         ("RESTARTING", "decides", "node 1 is gone")),
        ([part(state="SUCCEEDED", exit_code=0, finished=5.0)], Scheduler("running"), ("SUCCEEDED", None, None)),
        ([part(alive=False, state="RUNNING")], Scheduler("ended"), ("FAILED", None, DEAD)),
        ([part(alive=False, state="RUNNING")], Scheduler("ended", result="STOPPED"), ("STOPPED", None, None)),
        ([part(alive=False, state="RUNNING")], Scheduler("ended", "time limit", "FAILED"),
         ("FAILED", None, "time limit")),
        ([part(state="RUNNING")], Scheduler("unreachable", "host1 does not answer"),
         ("LOST", None, "host1 does not answer")),
        ([part(**failed("ValueError", 1))], Scheduler("unreachable", "host1"), ("FAILED", None, "rank 1: ValueError")),
    ],
)  # fmt: skip
def test_the_state_of_a_job_with_a_scheduler(
    parts: list[Part], scheduler: Scheduler, expected: tuple[str, str | None, str | None]
) -> None:
    record = fold(JOB, parts, scheduler)
    assert (record["state"], record["waiting"], record["error"]) == expected


@pytest.mark.parametrize(
    "parts", [[], [part(alive=False, state="RUNNING")], [part(**failed("node 1 is gone"))]]
)  # the last one: its nodes failed, and it was stopped before its scheduler started it again
def test_a_job_that_was_stopped_while_no_node_ran_it_has_the_exit_code_of_sigterm(parts: list[Part]) -> None:
    record = fold(JOB, parts, Scheduler("ended", result="STOPPED", finished=9.0))
    assert (record["state"], record["exit_code"], record["error"], record["cause"]) == ("STOPPED", 143, None, None)


def test_the_failure_of_a_rank_explains_a_job_better_than_the_loss_of_a_node() -> None:
    parts = [
        part(0, **failed("node 2 (host2) is gone", cause="node lost")),
        part(1, alive=False, state="RUNNING"),
        part(2, **failed("CUDA error", 2, "exception", 7)),
    ]
    record = fold(JOB, parts)
    assert (record["error"], record["cause"], record["exit_code"]) == ("rank 2: CUDA error", "exception", 7)
    record = fold(JOB, parts[:2])
    assert (record["error"], record["cause"], record["exit_code"]) == (DEAD, "agent", 1)


def test_a_traceback_belongs_to_the_error_of_a_job() -> None:
    status = failed("ValueError: no", 1, "exception")
    lines = [f"line {number}" for number in range(20)]
    status["failure"].update(has_traceback=True, traceback="\n".join(lines) + "\n")
    raised, lost = part(1, **status), part(0, **failed("node 1 (host1) is gone", cause="node lost"))
    last = {"rank": 1, "text": "\n".join(lines[-8:])}
    ended = Scheduler("ended", result="FAILED")
    assert fold(JOB, [lost, raised])["traceback"] == fold(JOB, [lost, raised], ended)["traceback"] == last
    for scheduler in (Scheduler("restarting"), ended._replace(reason="the time limit"), Scheduler("queued")):
        assert fold(JOB, [lost, raised], scheduler)["traceback"] is None
    status["failure"].update(has_traceback=False)  # the end of its log
    assert fold(JOB, [part(1, **status)])["traceback"] is None
    status["failure"].update(has_traceback=True, traceback="x" * 10**6)
    found = fold(JOB, [part(1, **status)])["traceback"]
    assert found is not None and len(found["text"]) < 5000


def test_the_scheduler_knows_when_a_job_ended_of_which_only_some_nodes_recorded_an_end() -> None:
    parts = [part(0, is_elastic=True, state="RUNNING"), part(1, is_elastic=True, **failed("x", 1))]
    record = fold(JOB, parts, Scheduler("ended", finished=7.0))
    assert (record["state"], record["finished"]) == ("FAILED", 7.0)


def test_an_elastic_job_has_the_nodes_of_its_last_attempt() -> None:
    gone = part(0, False, is_elastic=True, state="STOPPED", exit_code=143, finished=3.0, devices=["0"])
    others = [
        part(
            node, is_elastic=True, state="RUNNING", attempt=1, world_size=2, devices=["3"], ranks=[rank(it, "RUNNING")]
        )
        for it, node in enumerate((1, 2))
    ]
    record = fold(JOB, [gone, *others])
    assert (record["state"], record["attempt"], record["ranks"]) == ("RUNNING", 1, 2)
    assert [it["node"] for it in record["instances"]] == ["host1", "host2"]
    assert record["devices"] == ["0:3", "1:3"]
