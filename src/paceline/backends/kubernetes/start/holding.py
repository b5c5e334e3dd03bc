"""What owns a job's object while all else is made: a Job without pods, which the cluster removes soon.

So nothing is left of a job whose client was killed. A Job that no queue admits needs no other: it has no pods itself
until it is confirmed. One with a queue is suspended, and its deadline does not count; it must not have been started
either, because a queue may choose nodes only for a Job that never was.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from paceline.backends.kubernetes.manifests import objects
from paceline.backends.kubernetes.manifests.kinds.job import BatchJob
from paceline.backends.kubernetes.manifests.names import JOB_ID, LONGEST
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from paceline.backends.kubernetes.api.client import Cluster, Object
    from paceline.backends.kubernetes.manifests.kinds.base import Kind
    from paceline.backends.kubernetes.manifests.order import Order

DEADLINE = 180  # seconds within which everything of a job is made
LEFTOVER = 60  # seconds for which the rest of an interrupted submit is kept
_ID = 6  # letters of the job's id


def is_held(order: Order) -> bool:
    """Whether another Job owns the object of this one while it is made."""
    return order.is_queued or not isinstance(order.kind, BatchJob)


def name_of(order: Order) -> str:
    """What the Job is called that owns a job's object: as the job, so that no two have its name, if it may be."""
    if not isinstance(order.kind, BatchJob):
        return order.name
    return f"{order.name[: LONGEST - _ID - 1]}-{order.job_id[:_ID]}"


def manifest(order: Order) -> Object:
    """That Job."""
    pod = {"restartPolicy": "Never", "containers": [{"name": objects.CONTAINER, "image": order.image}]}
    spec: Object = {
        "parallelism": 0, "completions": 1, "activeDeadlineSeconds": DEADLINE, "ttlSecondsAfterFinished": LEFTOVER,
        "template": {"spec": pod},
    }  # fmt: skip
    meta = {"name": name_of(order), "namespace": order.namespace, "annotations": {JOB_ID: order.job_id}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec}


def let_go(cluster: Cluster, kind: Kind, name: str, holder: str, changes: Object | None = None) -> Object:
    """Take a job's object from the Job that owned it, and change it at the same time; returns the object."""
    changes = changes or {}
    free = {**changes, "metadata": {**changes.get("metadata", {}), "ownerReferences": None}}
    made = cluster.patch(kind.path(cluster, name), free)
    with contextlib.suppress(UserError):  # otherwise the cluster removes it soon
        cluster.delete(BatchJob().path(cluster, holder))
    return made
