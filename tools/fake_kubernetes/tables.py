"""Lists as kubectl shows them: the server prints the columns."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from .api import Api
    from .errors import Object
    from .resources import Resource


def wanted(request: web.BaseRequest) -> bool:
    """Whether a client asks for a table first."""
    first = request.headers.get("Accept", "").split(",")[0]
    return "as=Table" in first and "v=v1" in first.replace("v=v1beta1", "")


def table(resource: Resource, objects: list[Object], api: Api, metadata: Object | None = None) -> Object:
    """Objects as a Table."""
    columns = _COLUMNS.get(resource.qualified, [])
    if objects and objects[0].get("kind") == "Status":
        return objects[0]
    names = [("Name", "name", 0), *((name, "", wide) for name, wide, _ in columns), ("Age", "", 0)]
    definitions = [
        {"name": name, "type": "string", "format": form, "description": "", "priority": wide}
        for name, form, wide in names
    ]
    rows = []
    for object in objects:
        data = object["metadata"]
        cells = [data["name"], *(cell(object) for _, _, cell in columns), age(data["creationTimestamp"])]
        partial = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": data}
        rows.append({"cells": cells, "object": partial})
    version = objects[0]["metadata"]["resourceVersion"] if objects and metadata is None else ""
    return {
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata or {"resourceVersion": version},
        "columnDefinitions": definitions, "rows": rows,
    }  # fmt: skip


def age(since: str) -> str:
    begun = datetime.strptime(since, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    seconds = max(0, int((datetime.now(timezone.utc) - begun).total_seconds()))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _ready(pod: Object) -> str:
    found = pod["status"].get("containerStatuses") or []
    return f"{sum(one['ready'] for one in found)}/{len(pod['spec']['containers'])}"


def pod_status(pod: Object) -> str:
    """A pod's state in one word, as kubectl shows it."""
    status = pod["status"]
    reason = status.get("reason") or status.get("phase", "Unknown")
    for index, one in enumerate(status.get("initContainerStatuses") or []):
        state = one["state"]
        ended = state.get("terminated")
        if ended and ended["exitCode"] == 0:
            continue
        if ended:
            return f"Init:{ended.get('reason') or 'ExitCode:' + str(ended['exitCode'])}"
        waiting = (state.get("waiting") or {}).get("reason")
        if waiting and waiting != "PodInitializing":
            return f"Init:{waiting}"
        return f"Init:{index}/{len(pod['spec']['initContainers'])}"
    for one in status.get("containerStatuses") or []:
        for state in ("waiting", "terminated"):
            reason = (one["state"].get(state) or {}).get("reason") or reason
    return "Terminating" if pod["metadata"].get("deletionTimestamp") else str(reason)


def _restarts(pod: Object) -> str:
    return str(sum(one.get("restartCount", 0) for one in pod["status"].get("containerStatuses") or []))


def _job_status(job: Object) -> str:
    for one in job["status"].get("conditions") or []:
        if one["status"] == "True" and one["type"] in ("Complete", "Failed", "Suspended"):
            return str(one["type"])
    return "Terminating" if job["metadata"].get("deletionTimestamp") else "Running"


def _completions(job: Object) -> str:
    spec = job["spec"]
    return f"{job['status'].get('succeeded', 0)}/{spec.get('completions') or spec.get('parallelism')}"


def _duration(job: Object) -> str:
    return age(job["status"]["startTime"]) if job["status"].get("startTime") else ""


def _node(node: Object) -> str:
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions") or [])
    words = "Ready" if ready else "NotReady"
    return f"{words},SchedulingDisabled" if node["spec"].get("unschedulable") else words


def _last(event: Object) -> str:
    return age(event["lastTimestamp"])


_COLUMNS: dict[str, list[tuple[str, int, Callable[[Object], Any]]]] = {
    "pods": [
        ("Ready", 0, _ready), ("Status", 0, pod_status), ("Restarts", 0, _restarts),
        ("IP", 1, lambda pod: pod["status"].get("podIP", "<none>")),
        ("Node", 1, lambda pod: pod["spec"].get("nodeName", "<none>")),
    ],
    "jobs.batch": [("Status", 0, _job_status), ("Completions", 0, _completions), ("Duration", 0, _duration)],
    "nodes": [
        ("Status", 0, _node), ("Roles", 0, lambda node: "<none>"),
        ("Version", 0, lambda node: node["status"].get("nodeInfo", {}).get("kubeletVersion", "")),
    ],
    "services": [
        ("Type", 0, lambda one: one["spec"].get("type")), ("Cluster-IP", 0, lambda one: one["spec"].get("clusterIP")),
    ],
    "configmaps": [("Data", 0, lambda one: len(one.get("data") or {}) + len(one.get("binaryData") or {}))],
    "secrets": [("Type", 0, lambda one: one["type"]), ("Data", 0, lambda one: len(one.get("data") or {}))],
    "persistentvolumeclaims": [
        ("Status", 0, lambda one: one["status"].get("phase")), ("Volume", 0, lambda one: one["spec"].get("volumeName", "")),
    ],
    "events": [
        ("Last Seen", 0, _last), ("Type", 0, lambda one: one["type"]), ("Reason", 0, lambda one: one["reason"]),
        ("Object", 0, lambda one: f"{one['involvedObject']['kind'].lower()}/{one['involvedObject']['name']}"),
        ("Message", 0, lambda one: one["message"]),
    ],
    "namespaces": [("Status", 0, lambda one: one["status"].get("phase"))],
}  # fmt: skip
