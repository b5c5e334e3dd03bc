"""Reads copies of the logs on a volume (`kept`).

A pod of the job that runs reads them, and if there is none, a pod that is made for that, owned by the Job, and deleted
afterwards.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, NamedTuple

from paceline.backends.kubernetes.api.errors import ApiError
from paceline.backends.kubernetes.manifests.manifest import literal
from paceline.job.errors import UserError

from .describe import is_over
from .inside import chunks
from .pods import seen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.backends.kubernetes.api.object import Object
    from paceline.backends.kubernetes.manifests.kept import Kept as Place

    from .jobs import Found
    from .pods import Pod

_START_SECONDS = 120.0  # for the pod that reads
_LIFE = 900  # seconds after which the cluster ends it
_PAUSE = 0.2
_READER = "reader"
_READ = r"""
import glob, heapq, mmap, os, re, sys
folder, only_events = sys.argv[1], sys.argv[2] == "events"
begins = re.compile(rb'\S+ (?:\[rank \d+(?: attempt (\d+))?|\[paceline\] (?=.*"event": "started").*"attempt": (\d+))')
def last_attempt(path):
    if not os.path.getsize(path):
        return 0
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        end = len(text)
        while end > 0:
            start = text.rfind(b"\n", 0, end - 1) + 1
            match = begins.match(text[start:end])
            if match:
                return int(match[1] or match[2] or 0)
            end = start
    return 0
def lines(path):
    node = os.path.basename(path).split("-")[1].encode()
    with open(path, "rb") as file:
        for line in file:
            if not only_events or line.partition(b" ")[2].startswith(b"[paceline] "):
                yield node, line if line.endswith(b"\n") else line + b"\n"
paths = sorted(glob.glob(os.path.join(glob.escape(folder), "node-*.log")))
print(max(map(last_attempt, paths), default=0), flush=True)
for node, line in heapq.merge(*map(lines, paths), key=lambda it: it[1][:27]):
    sys.stdout.buffer.write(node + b" " + line)
"""


class Kept(NamedTuple):
    """What the copies have.

    Attributes:
        lines: the node ranks and the lines, each behind its time and without its end. Those of a node are in order.
    """

    last: int  # attempt
    lines: Iterator[tuple[int, bytes]]


def is_needed(job: Found) -> bool:
    """Whether pods are gone whose logs are only in the copies: of a node that has none, or that has a later one."""
    has_ended = is_over(job)
    there = {pod.index for pod in job.pods if pod.has_log or not has_ended}
    failed = sum(pod.phase == "Failed" for pod in job.pods)
    return len(there) < job.least or int((job.object.get("status") or {}).get("failed") or 0) > failed


def read(cluster: Cluster, job: Found, it: Place, *, only_events: bool = False) -> Kept:
    """What the copies have, in the order of time: all lines, or only those of events."""
    lines = _lines(cluster, job, it, "events" if only_events else "all")
    last = int(next(lines, b"0"))
    numbered = (line.partition(b" ") for line in lines)
    return Kept(last, ((int(node), line) for node, _, line in numbered))


def _lines(cluster: Cluster, job: Found, it: Place, what: str) -> Iterator[bytes]:
    """The lines that the program prints."""
    if job.running:
        yield from _read(cluster, job.running[0], job.python, it.folder, what)
        return
    path = cluster.path("v1", "pods")
    try:
        made = cluster.create(path, _reader(job, it))
    except ApiError as error:
        if error.code != 403:
            raise
        where = f"{it.folder} of volume {it.claim}"
        raise UserError(f"the logs of job {job.name} are in {where}; reading them takes a pod: {error}") from None
    name = made["metadata"]["name"]
    try:
        yield from _read(cluster, _when_running(cluster, name), job.python, it.folder, what)
    finally:
        cluster.delete(f"{path}/{name}", gracePeriodSeconds=0)


def _read(cluster: Cluster, pod: Pod, python: str, folder: str, what: str) -> Iterator[bytes]:
    rest = b""
    for data in chunks(cluster, pod, [python, "-c", _READ, folder, what]):
        *whole, rest = (rest + data).split(b"\n")
        yield from whole


def _when_running(cluster: Cluster, name: str) -> Pod:
    """A pod that was made, once it runs."""
    until = time.monotonic() + _START_SECONDS
    while True:
        pod = seen(cluster.get(cluster.path("v1", "pods", name)))
        if pod.runs:
            return pod
        if pod.is_over or time.monotonic() > until:
            why = pod.error or pod.waiting or f"it does not run after {_START_SECONDS:g} seconds"
            raise UserError(f"pod {name}, which was made to read the volume, does not run: {why}")
        time.sleep(_PAUSE)


def _reader(job: Found, it: Place) -> Object:
    """A pod with a volume of a job, on the nodes that the job's pods may run on; the Job owns it."""
    template, main = _template(job.object["spec"]), job.kind.main_container(job.object)
    resources = {"cpu": "500m", "memory": "256Mi"}
    container: Object = {
        "name": _READER, "image": main["image"], "resources": {"limits": resources, "requests": resources},
        "command": [literal(job.python), "-c", f"import time; time.sleep({_LIFE})"],
        "volumeMounts": [{"name": "volume", "mountPath": it.mount}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }  # fmt: skip
    same = ("imagePullSecrets", "nodeSelector", "tolerations", "securityContext", "priorityClassName", "schedulerName")
    for key in ("imagePullPolicy", "securityContext"):
        if key in main:
            container[key] = main[key]
    spec: Object = {
        "restartPolicy": "Never", "activeDeadlineSeconds": _LIFE, "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False, "enableServiceLinks": False, "containers": [container],
        "volumes": [{"name": "volume", "persistentVolumeClaim": {"claimName": it.claim}}],
        **{key: template[key] for key in same if key in template},
    }  # fmt: skip
    meta = job.object["metadata"]
    owner = {
        "apiVersion": job.kind.api_version, "kind": job.kind.title, "name": meta["name"], "uid": meta["uid"],
        "controller": False, "blockOwnerDeletion": False,
    }  # fmt: skip
    name = f"{job.name[:40].rstrip('-')}-volume-{secrets.token_hex(3)}"
    return {
        "apiVersion": "v1", "kind": "Pod", "spec": spec,
        "metadata": {"name": name, "namespace": meta["namespace"], "ownerReferences": [owner]},
    }  # fmt: skip


def _template(spec: Object) -> Object:
    """The specification of the pods, wherever a kind has it."""
    if "containers" in spec:
        return spec
    found: Iterator[Object] = (_template(it) for it in spec.values() if isinstance(it, dict))
    return next((it for it in found if it), {})
