"""The state of a job: a pure function of what its nodes recorded, of who is alive, and of what its scheduler reports.

It is the same for every backend. A recorded state is not trusted if its writer is gone: a part whose agent is gone
without a final state has FAILED, whatever it recorded.
"""

from __future__ import annotations

import shlex
import signal
from typing import TYPE_CHECKING, NamedTuple

from .pace import across
from .state import FINAL

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    from paceline.contract.nodejob import NodeJob
    from paceline.contract.records import (
        Cause,
        CheckpointRecord,
        Failure,
        FinalState,
        InstanceRecord,
        JobFacts,
        JobRecord,
        JobState,
        Part,
        ProgressRecord,
        State,
        TracebackRecord,
    )
    from paceline.node.journal.status import RankRecord, Status


ENDED_ON_NODES = "it has ended on its nodes; its scheduler decides whether it goes on"
# A job has that of its slowest node, and is suspended once all its nodes are.
_UNFINISHED: tuple[State, ...] = ("PENDING", "STARTING", "RESTARTING", "RUNNING", "SUSPENDED")
_WAITING = ("PENDING", "RESTARTING", "RUNNING", "SUSPENDED")
# Which failure explains a job best: that of a rank, a refusal, a node that was killed. Others only see that a node is
# gone, and a node that was told to end did not fail by itself.
_WEIGHTS = {"refused": 1, "agent": 2, "out of memory": 2, "preempted": 4}
_MOST_LINES, _MOST_LETTERS = 8, 4096  # of a traceback in a record; the logs have all of it

_BY_SIGTERM = 128 + signal.SIGTERM
_MOST_CAUSES = 3  # of slowness
_CODES: dict[State, int] = {"SUCCEEDED": 0, "STOPPED": _BY_SIGTERM}  # of ends that no node recorded


class Scheduler(NamedTuple):
    """What a scheduler reports of a job."""

    # `queued`: the job has no nodes yet. `running`: it has them. `suspended`: it keeps its place, and does not run.
    # `held`: likewise, until its user resumes it.
    # `restarting`: it will start again. `ended`: it will not. `unreachable`: a node of it does not answer.
    state: Literal["queued", "running", "suspended", "held", "restarting", "ended", "unreachable"]
    reason: str | None = None  # in one line, what it waits for, or why it ended
    result: FinalState | None = None  # how it ended, if the scheduler decides this; None if the nodes know it
    exit_code: int | None = None  # of the job, if the scheduler knows it better than the nodes
    finished: float | None = None  # when it ended; what its nodes recorded counts for more
    cause: Cause | None = None  # see `Failure`
    was_to_go_on: bool = False  # whether it ended while it was to start again, so after what its nodes recorded


def facts_of(spec: NodeJob) -> JobFacts:
    """What a job's specification says of it, which anybody may have written; the rest is for those who know it."""
    kind, target = spec.program
    program = [*(["-m"] if kind == "module" else []), *([target] if target else [])]
    asked = spec.devices
    return {
        "name": "", "backend": "", "framework": spec.framework, "nodes": 0, "ranks": 0, "created": 0.0,
        "max_restarts": int(spec.max_restarts), "priority": int(spec.priority),
        "devices_asked": asked if isinstance(asked, int) or asked is None else list(asked),
        "resume_from": None if spec.fresh else spec.resume_from, "queue": spec.queue, "image": spec.image,
        "labels": dict(spec.labels), "options": dict(spec.options),
        "ttl": None if spec.ttl is None else float(spec.ttl), "grace": float(spec.grace),
        "command": " ".join(shlex.quote(str(it)) for it in [*program, *spec.args]),
        "working_dir": str(spec.working_dir), "folder": "", "code": None, "data": [],
        "tensorboard": None, "environment": spec.environment,
        "time_limit": None if spec.time_limit is None else float(spec.time_limit),
        "user": str(spec.user) if spec.user else None,
    }  # fmt: skip


def part_of(
    status: Status,
    *,
    alive: bool | None,
    host: str,
    why: str = "",
    written: float | None = None,
    noticed: float | None = None,
    waiting: str | None = None,
    job_id: str | None = None,
    hosts: Sequence[str] = (),
    is_elastic: bool = False,
    progress: ProgressRecord | None = None,
    checkpoint: CheckpointRecord | None = None,
) -> Part:
    """A part from what its agent recorded."""
    state, failure = status.get("state", "PENDING"), status.get("failure")
    start, attempt = status.get("start"), int(status.get("attempt", 0))
    return {
        "state": state, "alive": alive, "why": why, "host": host, "node_rank": int(status.get("node_rank") or 0),
        "has_begun": start is not None, "is_in_attempt": start is not None and start.get("attempt") == attempt,
        "nodes": status.get("nodes"),
        "ranks": status.get("world_size"), "job_id": job_id, "hosts": hosts, "is_elastic": is_elastic,
        "attempt": attempt, "restarts": int(status.get("restarts", 0)),
        "exit_code": status.get("exit_code") if state in FINAL else None, "started": status.get("started"),
        "finished": status.get("finished") if state in FINAL else written, "noticed": noticed,
        "instances": [_instance(rank, host) for rank in status.get("ranks", ())],
        "failing_rank": None if failure is None else failure["rank"],
        "error": None if failure is None else _line(failure),
        "cause": None if failure is None else failure["cause"],
        "advice": None if failure is None else failure.get("advice") or None,
        "fault": None if failure is None else failure.get("fault"),
        "traceback": None if failure is None else _traceback(failure),
        "waiting": waiting, "devices": list(map(str, status.get("devices") or ())), "progress": progress,
        "checkpoint": checkpoint, "slow": status.get("slow") or [],
        "pace": status.get("pace"),
    }  # fmt: skip


def _line(failure: Failure) -> str:
    message = str(failure["message"])
    return message if failure.get("rank") is None else f"rank {failure['rank']}: {message}"


def _traceback(failure: Failure) -> TracebackRecord | None:
    """The end of the traceback of a failure that has one."""
    rank, text = failure.get("rank"), failure.get("traceback")
    if rank is None or not text or not failure.get("has_traceback"):
        return None
    lines = text[-_MOST_LETTERS:].rstrip("\n").split("\n")
    return {"rank": int(rank), "text": "\n".join(lines[-_MOST_LINES:])}


def _instance(rank: RankRecord, host: str) -> InstanceRecord:
    return {
        "name": str(rank["name"]), "node": host, "rank": int(rank["rank"]), "state": rank["state"],
        "pid": rank["pid"] or None, "exit_code": rank["exit_code"],
    }  # fmt: skip


def fold(job: JobFacts, parts: Sequence[Part], scheduler: Scheduler | None = None) -> JobRecord:
    """The record of a job."""
    state, nodes, ranks = _of_parts(parts)
    if scheduler is not None:
        state = _of_scheduler(state, parts, scheduler)
    if state["state"] == "STOPPED":  # a scheduler may send SIGTERM to all processes of a job, so that ranks end first
        ended = [_with_state(it, "STOPPED") if it["exit_code"] == _BY_SIGTERM else it for it in state["instances"]]
        state["instances"] = ended
    return {**job, "nodes": nodes or job["nodes"], "ranks": ranks or job["ranks"], **state}


def order(part: Part) -> tuple[int, bool, bool, int]:
    """The key by which those come first that are in the last attempt: from an elastic job others may have gone.

    A node that was cut off from the others just before an attempt has the number of that attempt as well.
    """
    return -part["attempt"], not part["is_in_attempt"], not part["has_begun"], part["node_rank"]


def last_attempt(parts: Sequence[Part]) -> list[Part]:
    """The parts that are in the last attempt, or may be about to take part in it."""
    parts = sorted(parts, key=order)
    count = _in_last(parts)
    return [part for number, part in enumerate(parts) if number < count or _state_of(part) not in FINAL]


def is_over(part: Part) -> bool:
    """Whether a part has ended for good."""
    return _state_of(part) in FINAL


def is_recent(record: JobRecord, since: float) -> bool:
    """Whether a job has not ended, or not before this time; of an end at an unknown time nobody knows that."""
    return record["state"] not in FINAL or record["finished"] is None or record["finished"] >= since


def _in_last(parts: list[Part]) -> int:
    """How many of these parts, in order, are in the last attempt."""
    last = [part for part in parts if part["attempt"] == parts[0]["attempt"]]
    begun = sum(part["is_in_attempt"] for part in last)
    return begun if begun >= (parts[0]["nodes"] or 1) else len(last)


def _state_of(part: Part) -> State:
    """The state of a part, from its record and its liveness."""
    if part["state"] in FINAL or part["alive"]:
        return part["state"]
    return "LOST" if part["alive"] is None else "FAILED"


def _of_parts(parts: Sequence[Part]) -> tuple[JobState, int | None, int | None]:
    """The state of a job as its nodes know it, and how many nodes and ranks it has."""
    if not parts:
        return _nothing(), None, None
    parts = sorted(parts, key=order)
    there, first, count = last_attempt(parts), parts[0], _in_last(parts)
    # A node that hangs does not know yet that the job has ended, and an agent that was killed could not record how; the
    # others know it, also those that were about to join if it has succeeded. From an elastic job a node may have gone
    # while others go on.
    known = [*parts[:count], *(part for part in parts[count:] if part["state"] == "SUCCEEDED")]
    ended = [part for part in known if part["state"] in FINAL and part["exit_code"] is not None]
    goes_on = any(part["is_elastic"] for part in parts) and any(_state_of(part) in _UNFINISHED for part in there)
    # Nodes that are about to join, or to come back, do not hold up those that run.
    runs = any(part["has_begun"] and not is_over(part) for part in parts[:count])
    deciding = ended if ended and not goes_on else parts[:count] if runs else there
    state = _common([_state_of(part) for part in deciding])
    failed = [part for part in there if _error_of(part) and state != "SUSPENDED"]  # then it waits for its user alone
    culprit = min(failed, key=_weight, default=None)
    telling = next((part for part in deciding if _state_of(part) == state), deciding[0])
    if state == "FAILED" and culprit is not None and culprit["exit_code"] is not None:
        telling = culprit
    over = state in FINAL
    own = culprit if culprit is not None and _error_of(culprit) == culprit["error"] else None
    return {
        "state": state,
        "attempt": first["attempt"],
        "exit_code": telling["exit_code"] if over else None,
        "started": min((part["started"] for part in parts if part["started"]), default=None),
        "finished": max(part["finished"] or 0.0 for part in deciding) or None if over else None,
        "instances": sorted((rank for part in there for rank in _instances(part)), key=lambda rank: rank["rank"]),
        "error": None if culprit is None else _error_of(culprit),
        "cause": None if culprit is None else _cause_of(culprit),
        "advice": None if own is None else own["advice"],
        "fault": None if own is None else own.get("fault"),  # a host may run an older version
        "traceback": None if own is None else own["traceback"],
        "waiting": telling["waiting"] if state in _WAITING else None,
        "restarts": first["restarts"],
        "devices": first["devices"] if len(parts) == 1 else
            [f"{number}:{device}" for number, part in enumerate(there) for device in part["devices"]],
        "kept_since": max(_kept_since(part) for part in deciding) or None if over else None,
        "progress": next((part["progress"] for part in parts if part["progress"]), None),
        "checkpoint": next((part["checkpoint"] for part in parts if part["checkpoint"]), None),
        "slow": [
            *across([pace for part in there if (pace := part["pace"]) is not None]),
            *next((part["slow"] for part in parts if part["slow"]), []),
        ][:_MOST_CAUSES],
    }, first["nodes"], first["ranks"]  # fmt: skip


def _kept_since(part: Part) -> float:
    return (part["finished"] if part["state"] in FINAL else part["noticed"]) or 0.0


def _nothing() -> JobState:
    """The state of a job of which nothing is known."""
    return {
        "state": "LOST", "attempt": 0, "exit_code": None, "started": None, "finished": None, "instances": [],
        "error": None, "cause": None, "advice": None, "fault": None, "traceback": None, "waiting": None,
        "restarts": 0, "devices": [], "kept_since": None, "progress": None, "checkpoint": None, "slow": [],
    }  # fmt: skip


def _common(states: list[State]) -> State:
    """The state of a job whose nodes have these states."""
    for state in _UNFINISHED:
        if state in states:
            return "STARTING" if state == "PENDING" and "RUNNING" in states else state
    ended: tuple[State, ...] = ("SUCCEEDED", "FAILED", "LOST")
    return next((state for state in ended if state in states), "STOPPED")


def _error_of(part: Part) -> str | None:
    return part["error"] if part["alive"] or part["state"] in FINAL else part["why"] or part["error"]


def _cause_of(part: Part) -> Cause | None:
    return part["cause"] or ("agent" if _state_of(part) == "FAILED" != part["state"] else None)


def _weight(part: Part) -> tuple[int, float]:
    weight = 0 if part["failing_rank"] is not None else _WEIGHTS.get(_cause_of(part) or "", 3)
    return weight, part["finished"] or float("inf")


def _instances(part: Part) -> list[InstanceRecord]:
    """The ranks of a part; they ended with its agent."""
    if not is_over(part):
        return part["instances"]
    return [_with_state(rank, "FAILED") if _runs(rank) else rank for rank in part["instances"]]


def _of_scheduler(found: JobState, parts: Sequence[Part], scheduler: Scheduler) -> JobState:
    """The state of a job as its nodes know it, corrected by what its scheduler reports."""
    state, reason, over = scheduler.state, scheduler.reason, found["state"] in FINAL
    if state == "ended":
        return _ended(found, parts, scheduler)
    if state == "unreachable":
        return found if over else {**found, "state": "LOST", "error": reason, "waiting": None}
    going: JobState = {**found, "exit_code": None, "finished": None, "kept_since": None, "waiting": reason}
    is_idle = state in ("suspended", "held") and (over or not any(part["alive"] for part in parts))
    if is_idle or state in ("queued", "restarting"):
        goes_on = state == "restarting" or (state == "queued" and parts)
        again: State = "SUSPENDED" if state == "held" else "RESTARTING" if goes_on else "PENDING"
        instances = [_with_state(rank, "STOPPED") for rank in found["instances"]]
        return {
            **going, "state": again, "error": None, "cause": None, "advice": None, "fault": None,
            "traceback": None, "instances": instances,
        }  # fmt: skip
    if not parts:
        return {**going, "state": "STARTING"}
    if over and found["state"] != "SUCCEEDED":
        return {**going, "state": "RESTARTING", "waiting": reason or ENDED_ON_NODES}
    return {**found, "waiting": None if over else reason or found["waiting"]}


def _ended(found: JobState, parts: Sequence[Part], scheduler: Scheduler) -> JobState:
    """The state of a job that its scheduler will not start again."""
    over = found["state"] in FINAL
    state = scheduler.result or (found["state"] if over else "FAILED")
    finished = found["finished"]
    # Else its nodes know it; of an elastic job only some may have recorded an end.
    if finished is None or scheduler.was_to_go_on or not any(part["state"] in FINAL for part in parts):
        finished = max(finished or 0.0, scheduler.finished or 0.0) or None
    code = found["exit_code"] if scheduler.exit_code is None else scheduler.exit_code
    is_unknown = scheduler.exit_code is None and state == "STOPPED" != found["state"]
    if is_unknown or (code == 0) != (state == "SUCCEEDED"):  # the nodes know nothing of this end
        code = _CODES.get(state)
    is_failed = state == "FAILED"
    return {
        **found, "state": state, "exit_code": code, "waiting": None, "finished": finished,
        "error": scheduler.reason or (found["error"] if is_failed else None),
        "cause": scheduler.cause or (found["cause"] if is_failed else None),
        "advice": found["advice"] if is_failed and not scheduler.reason else None,
        "fault": found["fault"] if is_failed and not scheduler.reason else None,
        "traceback": found["traceback"] if is_failed and not scheduler.reason else None,
        "kept_since": finished if scheduler.was_to_go_on else found["kept_since"] or scheduler.finished,
        "instances": [_with_state(rank, state) if _runs(rank) else rank for rank in found["instances"]],
    }  # fmt: skip


def _runs(rank: InstanceRecord) -> bool:
    return rank["state"] in ("STARTING", "RUNNING")


def _with_state(rank: InstanceRecord, state: str) -> InstanceRecord:
    return {**rank, "state": state}
