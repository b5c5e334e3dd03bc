"""A job of several machines, from the records that each of them has of its part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .records import FINAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    Record = dict[str, Any]

_GOING = ("PENDING", "STARTING", "RESTARTING", "RUNNING")  # a job on several nodes has the state of the least advanced
_IDS = ("job_id", "hosts", "node_rank", "is_elastic", "has_begun")  # see `home.with_ids`


def in_order(part: Record) -> tuple[int, bool, int]:
    """The key by which those come first that are in the last attempt: from an elastic job others may have gone."""
    return -part["attempt"], not part["has_begun"], part["node_rank"] or 0


def merged(parts: Sequence[Record]) -> tuple[Record, bool]:
    """The record of a job from those of its parts, as `home.with_ids` makes them; and whether no part is missing."""
    parts = sorted(parts, key=in_order)
    is_elastic = any(part["is_elastic"] for part in parts)  # then others may have come
    records = [{key: value for key, value in part.items() if key not in _IDS} for part in parts]
    job = dict(records[0])
    last = [part for part in parts if part["attempt"] == job["attempt"]]
    begun = [part for part in last if part["has_begun"]]
    count = len(begun) if len(begun) >= job["nodes"] else len(last)  # they come first
    # A part that has not ended is about to be in the last attempt, if it is not there yet.
    there = [it for number, it in enumerate(records) if number < count or it["state"] not in FINAL]
    if len(records) > 1:
        over = [it for it in records[:count] if it["state"] in FINAL and it["exit_code"] is not None]
        knows = bool(over) and (len(over) == count or not is_elastic)
        job.update(_together(there, over if knows else there))
        job["checkpoint"] = next((record["checkpoint"] for record in records if record["checkpoint"]), None)
        job["created"] = min(record["created"] for record in records)
        job["started"] = min((record["started"] for record in records if record["started"]), default=None)
    return job, len(there) >= job["nodes"] or job["state"] in FINAL


def _together(records: list[Record], knowing: list[Record]) -> Record:
    """The merged record of a job's last attempt; `knowing` are the records that decide its state.

    A host that hangs does not know yet that the job has ended.
    """
    states = [record["state"] for record in knowing]
    going = [state for state in _GOING if state in states]
    # An agent that was killed could not record how the job ended; the others did.
    said = [record["state"] for record in knowing if record["exit_code"] is not None] or states
    ended = next((state for state in ("SUCCEEDED", "FAILED", "LOST") if state in said), "STOPPED")
    state = going[0] if going else ended
    telling = next((record for record in knowing if record["state"] == state), knowing[0])
    is_over = state in FINAL
    return {
        "state": state,
        "exit_code": telling["exit_code"],
        "error": next((record["error"] for record in records if record["error"]), None),
        "waiting": telling["waiting"],
        "finished": max(record["finished"] or 0.0 for record in knowing) if is_over else None,
        "instances": sorted((rank for record in records for rank in record["instances"]), key=lambda r: r["rank"]),
        "devices": [f"{node}:{device}" for node, record in enumerate(records) for device in record["devices"]],
    }
