"""A TensorBoard of a job whose pods are gone: a pod of its own shows what is on a volume, until the client ends it."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

from paceline.backends.kubernetes.api.errors import ApiError
from paceline.backends.kubernetes.look.kept_reader import pod_with_volume, when_running
from paceline.backends.kubernetes.manifests.kept import is_below
from paceline.job.errors import UserError
from paceline.node.tensorboard import PROGRAM

if TYPE_CHECKING:
    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.backends.kubernetes.look.jobs import Found

PORT = 6006
_ADDRESS = re.compile(rb" at (http://\S+)")
_LIFE = 8 * 3600  # seconds after which the cluster ends it, if the client was killed
_RESOURCES = {"cpu": "1", "memory": "2Gi"}


def start(cluster: Cluster, job: Found, logdir: str | None) -> tuple[str, str]:
    """Start a pod with a TensorBoard; returns its name, and the address in the pod, once that answers."""
    folder = logdir or job.spec.get("tensorboard_dir")
    mounts = [it for it in job.spec.get("data") or () if folder and is_below(str(folder), it["path"])]
    if not mounts:
        raise UserError(
            f"the pod of rank 0 of job {job.name} does not run, and so no TensorBoard there; what is on a volume of "
            "the job can be shown all the same: name it with --logdir"
        )
    mount = max(mounts, key=lambda it: len(it["path"]))
    flags = ["--logdir", str(folder), "--host", "127.0.0.1", "--port", str(PORT)]
    command = [job.python, "-c", PROGRAM, *flags]
    manifest = pod_with_volume(
        job, mount["volume"], mount["path"], command, resources=_RESOURCES, seconds=_LIFE
    )  # fmt: skip
    name = str(cluster.create(cluster.path("v1", "pods"), manifest)["metadata"]["name"])
    try:
        pod = when_running(cluster, name)
        for line in cluster.log(name, pod.container, follow=True, since=None):
            if found := _ADDRESS.search(line):
                return name, found[1].decode()
        when_running(cluster, name)  # it says why not
        raise UserError(f"the TensorBoard in pod {name} does not start")
    except BaseException:
        end(cluster, name)
        raise


def end(cluster: Cluster, name: str) -> None:
    """End it."""
    with contextlib.suppress(ApiError):
        cluster.delete(cluster.path("v1", "pods", name), gracePeriodSeconds=0)
