"""What happened to a job: what its nodes report in their logs and the cluster warns of; what it has used and logged."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, cast

from paceline.backends.base import History
from paceline.backends.kubernetes.api.errors import ApiError
from paceline.backends.kubernetes.api.times import moment
from paceline.node.host.pod_format import HISTORY

from . import logs
from .inside import asked
from .pods import time_of

if TYPE_CHECKING:
    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.contract import messages
    from paceline.contract.records import EventRecord
    from paceline.job.errors import UserError

    from .jobs import Found

_TAKEN = ("Preempted", "TaintManagerEviction")  # why a pod was taken away; of the type Normal
_OF_LOGS = ("ranks", "logs")  # which files of an attempt are whose
_ONCE = ("started", "finished", "restarting", "stopping", "waiting", "hang")  # each node reports them


def events(cluster: Cluster, job: Found) -> list[EventRecord]:
    """The events of a job in the order of time.

    A pod's report goes with the pod.
    """
    found: list[EventRecord] = []
    reported: set[tuple[str, Any, Any]] = set()
    silent: dict[str, UserError] = {}
    for entry in logs.events(cluster, job, silent):
        details = {key: value for key, value in (entry.event or {}).items() if key not in _OF_LOGS}
        event = cast("EventRecord", {"time": entry.time, **details})
        if event["event"] == HISTORY:
            continue
        key = event["event"], event.get("attempt"), event.get("why")
        if event["event"] in _ONCE and key in reported:
            continue
        reported.add(key)
        found.append(event)
    now = time.time()
    found += [{"time": now, "event": "silent", "host": it, "message": str(why)} for it, why in silent.items()]
    found += _warnings(cluster, job)
    found.sort(key=lambda event: event["time"])
    return found


def _warnings(cluster: Cluster, job: Found) -> list[EventRecord]:
    """The cluster's warnings about the job and its pods, also of lost ones; it keeps them for an hour."""
    try:
        items = [item for page in cluster.pages(cluster.path("v1", "events")) for item in page["items"]]
    except ApiError:
        return []
    parts = job.kind.parts(job.name)
    hosts = {job.kind.host(job.name, number) for number in range(job.nodes)}
    begins = "|".join(map(re.escape, hosts | set(map(_cut, hosts))))
    lost = re.compile(rf"({begins})(-[a-z0-9]{{5}})?")
    pods = {pod.name for pod in job.pods}
    found: list[EventRecord] = []
    for item in items:
        if item.get("type") != "Warning" and item.get("reason") not in _TAKEN:
            continue
        target = item.get("involvedObject") or {}
        made = moment(item.get("firstTimestamp") or item["metadata"].get("creationTimestamp")) or 0.0
        is_now = made >= int(moment(job.object["metadata"]["creationTimestamp"]) or 0.0)
        kind, name = target.get("kind"), str(target.get("name"))
        if is_now and ((kind, name) in parts or (kind == "Pod" and (name in pods or lost.fullmatch(name)))):
            message = " ".join(str(item.get("message") or "").split())
            event, host = item.get("reason", "Warning"), target.get("name")
            found.append({"time": time_of(item), "event": event, "host": host, "message": message})
    return found


def _cut(host: str) -> str:
    """What a controller puts before the five letters of a pod's name, of which it takes 58 letters with the dash."""
    name, _, number = host.rpartition("-")
    return f"{name[: 56 - len(number)]}-{number}"


# -- what it has used and logged ---------------------------------------------------------------------------------------


def history(cluster: Cluster, job: Found, since: float) -> History:
    """The history of a job."""
    if job.is_plain:
        return History([], ("the job is a plain one: nothing of paceline is in its pods, so nothing is recorded",))
    answers: dict[int, messages.Histories]
    silent: dict[int, UserError] = {}
    answers = asked(cluster, job.running, {"do": "history", "name": job.name, "since": since}, job.python, silent)
    nodes = [node for answer in answers.values() for node in answer["nodes"]]
    warnings: dict[str, UserError] = {str(error): error for error in silent.values()}
    if len(answers) < len(job.pods):
        entries = logs.events(cluster, job, warnings)
        ended = (entry.event["node"] for entry in entries if entry.event and entry.event["event"] == HISTORY)
        nodes += (node for node in ended if not node["telemetry"] or node["telemetry"][-1]["time"] > since)
    nodes.sort(key=lambda node: node["node_rank"])
    return History(nodes, tuple(map(str, warnings.values())))
