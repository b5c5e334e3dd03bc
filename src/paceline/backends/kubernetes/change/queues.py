"""Kueue, which alone decides whether a job with a queue runs: one that is only suspended it lets run again.

It keeps a Workload for each job with a queue. A Workload that is not active is evicted, and never admitted.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from paceline.backends.kubernetes.manifests.kinds.base import condition
from paceline.backends.kubernetes.manifests.names import KUEUE, QUEUE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.backends.kubernetes.api.object import Object

_JOB_UID = "kueue.x-k8s.io/job-uid"
_EVICTION_SECONDS = 10.0
_PAUSE = 0.2


def version(cluster: Cluster) -> str | None:
    """The API version of Workloads; None where Kueue is not installed."""
    return next((it for it in KUEUE if cluster.serves(it, "Workload")), None)


def _workloads(cluster: Cluster, job: Object) -> list[str]:
    """The paths of the Workloads that Kueue keeps for a job."""
    api_version = version(cluster)
    if api_version is None:
        return []
    path = cluster.path(api_version, "workloads")
    found = cluster.items(path, labelSelector=f"{_JOB_UID}={job['metadata']['uid']}")
    return [f"{path}/{workload['metadata']['name']}" for workload in found]


def activate(cluster: Cluster, job: Object, queue: str) -> Mapping[str, str]:
    """Have a job's queue admit it again; returns the labels to give it: its queue, if that had not seen it."""
    for at in _workloads(cluster, job):
        cluster.patch(at, {"spec": {"active": True}})
    return {QUEUE: queue}


def deactivate(cluster: Cluster, job: Object) -> Mapping[str, None]:
    """Have a job's queue let it run no more; returns the labels to take from it: its queue, if that has not seen it."""
    if QUEUE not in (job["metadata"].get("labels") or {}) or version(cluster) is None:
        return {}
    found = _workloads(cluster, job)
    for at in found:
        now = cluster.patch(at, {"spec": {"active": False}})
        until = time.monotonic() + _EVICTION_SECONDS
        while condition(now, "Admitted") and not condition(now, "Evicted") and time.monotonic() < until:
            time.sleep(_PAUSE)  # before it is evicted, the job would be resumed
            now = cluster.get(at)
    return {} if found else {QUEUE: None}
