"""Code that is too large for ConfigMaps: it is sent into a pod, from which the job's other pods get it.

See `node/host/code_stream.py` for the pods' side.
"""

from __future__ import annotations

import contextlib
import json
import queue
import time
from typing import TYPE_CHECKING, Any

from paceline.backends.kubernetes.api.errors import Expired
from paceline.backends.kubernetes.api.rights import missing
from paceline.backends.kubernetes.manifests.objects import PACKAGE, WORK
from paceline.backends.kubernetes.manifests.packed import BLOCK
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from paceline.backends.base import ProgressReporter
    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.backends.kubernetes.look.jobs import Found
    from paceline.backends.kubernetes.look.pods import Pod
    from paceline.backends.kubernetes.manifests.packed import Packed

_PROTOCOLS = ["v5.channel.k8s.io", "v4.channel.k8s.io"]
_STDIN, _OUT, _ERR, _END = 0, 1, 2, 3  # channels
_PATIENCE = 60.0  # seconds for a pod to check and store what it got
_LOOK_SECONDS = 2.0  # until pods are looked for again, if nothing changes
_RECEIVE = (
    "import sys, json, pathlib; sys.path.insert(0, sys.argv[1]); from paceline.node.host.code_stream import receive; "
    "receive(pathlib.Path(sys.argv[2]), json.loads(sys.argv[3]))"
)
NAME = "code.tar.gz"  # beside the pod's part of the job


def check_allowed(cluster: Cluster, code: Packed) -> None:
    """Refuse code that this user may not send into pods.

    Raises:
        UserError: the user has no permission.
    """
    lacking = missing(cluster, "", "pods/exec", ("create", "get"))
    if lacking:
        raise UserError(
            f"the code has {code.shown_size} when packed, more than fits into ConfigMaps, and you may not send it into "
            f"pods: a Role in namespace {cluster.namespace} has to grant apiGroups: [''], resources: [pods/exec], "
            f"verbs: [{', '.join(lacking)}]; or name what the job does not need in .pacelineignore"
        )


def send(cluster: Cluster, name: str, code: Packed, progress: ProgressReporter) -> None:
    """Wait until a pod of a job runs, and send it the code. Returns too if the job ends before.

    Raises:
        UserError: the job was deleted.
    """
    from paceline.backends.kubernetes.look.jobs import explain, find, shown

    while True:
        job = find(cluster, [name]).get(name)
        if job is None:
            raise UserError(f"job {name} was deleted while its code was sent")
        if shown(job, "", "").is_over:
            return
        running = [pod for pod in job.newest().values() if pod.phase == "Running" and not pod.is_over]
        if not job.kind.reaches_all:
            running = [pod for pod in running if pod.index == 0]
        for pod in running:
            with contextlib.suppress(UserError):  # it has just begun, or the connection broke: again
                _send_to(cluster, pod, code, job.python, progress)
                return
        if not running:
            explain(cluster, job)
            why = shown(job, "", "").waiting
            progress(f"waiting for a pod of {name} to send it the code{f': {why}' if why else ''}", 0, None)
        _wait_for_change(cluster, job)


def _wait_for_change(cluster: Cluster, job: Found) -> None:
    """Wait until the status of a job changes, which counts its pods, or for a moment."""
    version = job.object["metadata"]["resourceVersion"]
    path = job.kind.path(cluster)
    until = time.monotonic() + _LOOK_SECONDS
    with contextlib.suppress(Expired):
        for kind, _ in cluster.watch(path, version, _LOOK_SECONDS, fieldSelector=f"metadata.name={job.name}"):
            if kind != "BOOKMARK":
                break
    time.sleep(max(0.0, min(0.2, until - time.monotonic())))


def _send_to(cluster: Cluster, pod: Pod, code: Packed, python: str, progress: ProgressReporter) -> None:
    """Send the code into a pod.

    Raises:
        UserError: it does not take it.
    """
    import httpx2
    from httpx2.websockets import HTTPXWSException

    expected = json.dumps({"bytes": code.size, "sha256": code.sha256})
    command = [python, "-c", _RECEIVE, PACKAGE, f"{WORK}/{NAME}", expected]
    params: list[tuple[str, Any]] = [("container", pod.container), ("stdin", "true"), ("stdout", "true")]
    params += [("stderr", "true"), *(("command", word) for word in command)]
    url = cluster.path("v1", "pods", pod.name, "exec")
    code.file.seek(0)
    sent = 0
    try:
        with cluster.access.http.websocket(url, subprotocols=_PROTOCOLS, params=params) as connection:
            while data := code.file.read(BLOCK):
                connection.send_bytes(bytes([_STDIN]) + data)
                sent += len(data)
                progress(f"sending the code to pod {pod.name}", sent, code.size)
            said, until = b"", time.monotonic() + _PATIENCE
            while True:
                data = connection.receive_bytes(timeout=max(0.01, until - time.monotonic()))
                if data[:1] in (bytes([_OUT]), bytes([_ERR])):
                    said += data[1:]
                elif data[:1] == bytes([_END]):
                    if json.loads(data[1:] or b"{}").get("status") != "Success":
                        lines = said.decode(errors="replace").splitlines()
                        raise UserError(f"pod {pod.name} does not take the code: {lines[-1] if lines else ''}")
                    return
    except (httpx2.HTTPError, HTTPXWSException, queue.Empty, OSError, ValueError) as error:
        raise UserError(f"pod {pod.name} does not take the code: {error or type(error).__name__}") from None
