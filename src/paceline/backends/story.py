"""What happened to a job: what its nodes recorded, and what only the record of the job has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.job.job import Job

_OF_ATTEMPTS = ("started", "restarting", "requeued", "reopened")


def story(job: Job, recorded: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of a job in the order of time.

    A node may have recorded no end, if its agent was killed; and what a pod recorded goes with the pod.

    Args:
        recorded: what its backend knows of its events, in the order of time.
    """
    asked = {
        "ranks": job.ranks, "nodes": job.nodes, "devices": job.devices_asked or None, "resume_from": job.resume_from
    }  # fmt: skip
    found: list[dict[str, Any]] = [{"time": job.created, "event": "submitted", **asked}, *map(dict, recorded)]
    started = next((it for it in found if it["event"] == "started"), None)
    if started is None and job.started is not None:
        started = {"time": job.started, "event": "started"}
        found.append(started)
    if started is not None and "host" not in started:
        started["on"] = list(dict.fromkeys(rank.node for rank in job.instances if rank.node))
    found.sort(key=_time)
    last = next((it["event"] for it in reversed(found) if it["event"] in (*_OF_ATTEMPTS, "finished")), "")
    if job.is_over and job.finished is not None and last != "finished":
        time = max(job.finished, found[-1]["time"])  # the job's is that of its last file, by a coarser clock
        end = {"state": job.state, "exit_code": job.exit_code, "why": job.error}
        found.append({"time": time, "event": "finished", **end})
    return found


def _time(event: dict[str, Any]) -> float:
    return float(event["time"])
