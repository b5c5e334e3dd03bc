"""A Job that ends unless its client is there: its deadline is short, and the client moves it on.

Pods have no permission in the cluster, and cannot see the client. But each Job may have a deadline, and the cluster
itself ends the Job there. So if the client is killed, or has no connection for that long, the job ends.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

from paceline.job.errors import UserError

if TYPE_CHECKING:
    from paceline.backends.kubernetes.api.client import Cluster, Object

SECONDS = 180  # for which a Job lives without its client
_EVERY = 30.0  # seconds between two moves
_SOON = 5.0  # seconds until the next try


class Lease:
    """While it is held, the deadline of a Job is moved on."""

    def __init__(self, cluster: Cluster, job: Object, most: int | None = None) -> None:
        """Nothing is moved yet."""
        self._cluster, self._most = cluster, most
        self._path = cluster.path("batch/v1", "jobs", job["metadata"]["name"])
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._move, daemon=True)
        self._started = (job.get("status") or {}).get("startTime")
        self._base, self._since = job["spec"].get("activeDeadlineSeconds") or SECONDS, time.monotonic()
        self._moved = self._since

    @property
    def ends(self) -> float:
        """When the job ends unless the deadline is moved on (monotonic)."""
        return self._moved + SECONDS

    def hold(self) -> None:
        """Begin, until `release`, or the end of the job or of this process."""
        self._thread.start()

    def release(self) -> None:
        """Move it no more."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _note(self, job: Object) -> bool:
        """Note whether the Job started anew: its deadline counts from there. Returns whether it still goes on."""
        status = job.get("status") or {}
        if status.get("startTime") != self._started:
            self._started, self._base, self._since = status.get("startTime"), SECONDS, time.monotonic()
        ended = {it["type"] for it in status.get("conditions") or () if it["status"] == "True"}
        return not ended & {"Complete", "Failed"}

    def _move(self) -> None:
        pause = _EVERY
        while not self._is_over.wait(pause):
            wanted = math.ceil(self._base + time.monotonic() - self._since)
            if self._most is not None:
                wanted = min(wanted, self._most)
            began = time.monotonic()
            try:
                if not self._note(self._cluster.patch(self._path, {"spec": {"activeDeadlineSeconds": wanted}})):
                    return
            except UserError as error:
                if getattr(error, "code", 0) == 404:
                    return
                pause = _SOON
            else:
                pause, self._moved = _EVERY, began
