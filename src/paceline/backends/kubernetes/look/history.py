"""What a job has used and logged: pods that run are asked; others have written it at the end of their logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.backends.base import History
from paceline.node.host.pod_format import HISTORY

from . import logs
from .describe import described
from .inside import asked

if TYPE_CHECKING:
    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.contract.records import NodeHistory
    from paceline.job.errors import UserError

    from .jobs import Found


def history(cluster: Cluster, job: Found, since: float) -> History:
    """The history of a job."""
    if job.is_plain:
        return History([], ("the job is a plain one: nothing of paceline is in its pods, so nothing is recorded",))
    running = [it for it in job.pods if it.phase == "Running" and not (it.is_over or it.is_leaving)]
    answers = asked(cluster, running, {"do": "history", "name": job.name, "since": since}, job.python)
    nodes: list[NodeHistory] = [node for answer in answers.values() for node in answer["nodes"]]
    warnings: dict[str, UserError] = {}
    if len(answers) < len(job.pods):
        entries = logs.events(cluster, job, warnings, is_over=described(job, "", "").is_over)
        ended = (entry.event["node"] for entry in entries if entry.event and entry.event["event"] == HISTORY)
        nodes += (node for node in ended if not node["telemetry"] or node["telemetry"][-1]["time"] > since)
    nodes.sort(key=lambda node: node["node_rank"])
    return History(nodes, tuple(map(str, warnings.values())))
