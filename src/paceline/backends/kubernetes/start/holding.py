"""What ends a job whose client is gone.

While all else is made, a Job without pods owns the job's object; the cluster removes it soon. A Job that no queue
admits needs no other: it has no pods itself until it is confirmed. One with a queue is suspended, and its deadline does
not count; it must not have been started either, because a queue may choose nodes only for a Job that never was.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING

from paceline.backends.kubernetes.api.errors import Gone
from paceline.backends.kubernetes.manifests import objects
from paceline.backends.kubernetes.manifests.kinds.job import BatchJob
from paceline.backends.kubernetes.manifests.names import JOB_ID, LONGEST
from paceline.backends.repeated import Repeated
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.backends.kubernetes.api.object import Object
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


# -- a Job that ends unless its client moves its deadline on -----------------------------------------------------------


LEASE_SECONDS = 180  # for which a Job lives without its client
_EVERY = 30.0  # seconds between two moves
_SOON = 5.0  # seconds until the next try


def _clock() -> float:
    """Seconds that also pass while this machine is suspended, as they do in the cluster."""
    # On Linux `monotonic` stands still meanwhile; on macOS this one of the system goes on.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Lease:
    """While it is held, the deadline of a Job is moved on.

    Pods have no permission in the cluster, and cannot see the client. But each Job may have a deadline, and the cluster
    itself ends the Job there. So if the client is killed, or has no connection for that long, the job ends.
    """

    def __init__(self, cluster: Cluster, job: Object, most: int | None = None) -> None:
        self._cluster, self._most = cluster, most
        self._path, self._uid = cluster.path("batch/v1", "jobs", job["metadata"]["name"]), job["metadata"]["uid"]
        self._moves: Repeated | None = None
        self._started = (job.get("status") or {}).get("startTime")
        self._base, self._since = job["spec"].get("activeDeadlineSeconds") or LEASE_SECONDS, _clock()
        self._moved = time.monotonic()

    @property
    def ends(self) -> float:
        """When the job ends unless the deadline is moved on (monotonic)."""
        return self._moved + LEASE_SECONDS

    def hold(self) -> None:
        """Begin, until `release`, or the end of the job or of this process."""
        self._moves = Repeated(self._move, _EVERY)

    def release(self) -> None:
        """Move it no more."""
        if self._moves is not None:
            self._moves.stop()
            self._moves.join()

    def _note(self, job: Object) -> bool:
        """Note whether the Job started anew: its deadline counts from there. Returns whether it still goes on."""
        status = job.get("status") or {}
        if status.get("startTime") != self._started:
            self._started, self._base, self._since = status.get("startTime"), LEASE_SECONDS, _clock()
        ended = {it["type"] for it in status.get("conditions") or () if it["status"] == "True"}
        return not ended & {"Complete", "Failed"}

    def _is_another(self) -> bool:
        """Whether the Job of this name is a later one."""
        try:
            return bool(self._cluster.get(self._path)["metadata"]["uid"] != self._uid)
        except UserError:
            return False

    def _move(self) -> float | None:
        wanted = math.ceil(self._base + _clock() - self._since)
        if self._most is not None:
            wanted = min(wanted, self._most)
        began = time.monotonic()
        # The server refuses another uid: that Job is a later one of this name.
        change = {"metadata": {"uid": self._uid}, "spec": {"activeDeadlineSeconds": wanted}}
        try:
            if not self._note(self._cluster.patch(self._path, change)):
                return None
        except UserError as error:
            return None if isinstance(error, Gone) or self._is_another() else _SOON
        self._moved = began
        return _EVERY
