"""More or fewer pods for a job that runs: its parallelism, from MIN to MAX. The cluster chooses which pods leave."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

from paceline.backends.kubernetes.look.jobs import find
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.backends.kubernetes.look.jobs import Found

_SECONDS = 15.0  # for the Job controller to act
_PAUSE = 0.2


def scale_out(cluster: Cluster, job: Found, more: Sequence[str] | int | None) -> list[str]:
    """Let a job have more pods; returns the names of the hosts of those that are made."""
    now = _parallelism(job, more)
    wanted = job.nodes if more is None else min(job.nodes, now + cast("int", more))
    before = _hosts(job)
    if wanted == now:
        return []
    _set(cluster, job, wanted)
    return sorted(_seen(cluster, job, lambda hosts: len(hosts) >= wanted) - before)


def scale_in(cluster: Cluster, job: Found, fewer: Sequence[str] | int) -> list[str]:
    """Let a job have fewer pods; returns the names of the hosts of those that leave."""
    now = _parallelism(job, fewer)
    wanted = now - cast("int", fewer)
    if wanted < job.least:
        raise UserError(
            f"job {job.name} needs {job.least} pods, and {max(0, wanted)} would be left; add others first, or end it "
            f"with paceline stop {job.name}"
        )
    before = _hosts(job)
    _set(cluster, job, wanted)
    return sorted(before - _seen(cluster, job, lambda hosts: len(hosts) <= wanted))


def _parallelism(job: Found, asked: Sequence[str] | int | None) -> int:
    """How many pods a job has at most now; refuses to change that by anything but a number."""
    if job.ending is not None:
        raise UserError(f"job {job.name} has ended")
    if job.least == job.nodes:
        raise UserError(f"job {job.name} has a fixed number of pods, {job.nodes}; submit it with --nnodes MIN:MAX")
    if not isinstance(asked, int) and asked is not None:
        raise UserError("on Kubernetes the cluster chooses which pods come and leave; give their number with --nnodes")
    return int(job.object["spec"]["parallelism"])


def _set(cluster: Cluster, job: Found, parallelism: int) -> None:
    cluster.patch(job.kind.path(cluster, job.name), {"spec": {"parallelism": parallelism}})


def _hosts(job: Found) -> set[str]:
    """The host names of the pods that are not leaving."""
    return {job.kind.host(job.name, pod.index) for pod in job.pods if not pod.is_over and not pod.is_leaving}


def _seen(cluster: Cluster, job: Found, is_so: Callable[[set[str]], bool]) -> set[str]:
    """The host names once the cluster has acted, or has not in time, such as for a quota."""
    until = time.monotonic() + _SECONDS
    while True:
        found = find(cluster, [job.name]).get(job.name)
        hosts = set() if found is None else _hosts(found)
        if is_so(hosts) or time.monotonic() > until:
            return hosts
        time.sleep(_PAUSE)
