"""The nodes of a cluster, and what jobs use there: `paceline top`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from paceline.backends.kubernetes.api.errors import ApiError
from paceline.backends.kubernetes.api.times import moment
from paceline.backends.kubernetes.manifests.names import INSTANCE, SELECTOR
from paceline.job.job import Node, Usage, Volume

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.backends.kubernetes.api.object import Object

_UNITS = {
    "m": 1e-3, "n": 1e-9, "u": 1e-6, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50, "Ei": 1 << 60,
}  # fmt: skip
_UNMEASURED = "the cluster has no metrics-server that answers"
_ROLE = "node-role.kubernetes.io/"  # a label's name begins so


@dataclass
class Machine:
    """A node of the cluster, and what pods have been given of it."""

    name: str
    state: str  # ready, or why it takes no pods
    allocatable: Mapping[str, str]  # resource → how much pods may have
    labels: Mapping[str, str]
    requested: dict[str, float] = field(default_factory=dict)  # resource → how much they have
    gpus: dict[str, int] = field(default_factory=dict)  # name of a job, or of another pod → how many GPUs it has
    address: str = ""  # within the cluster

    @property
    def allocated_gpus(self) -> int:
        """How many GPUs pods have."""
        return sum(self.gpus.values())


@lru_cache(maxsize=1024)  # thousands of pods request the same
def amount(text: str | float | None) -> float:
    """A quantity as Kubernetes writes it: 100m, 16Gi, 1e3."""
    if not isinstance(text, str):
        return float(text or 0)
    number = text.rstrip("KMGTPEimnuk")
    try:
        return float(number) * _UNITS[text[len(number) :]]
    except (ValueError, KeyError):
        return float(text) if text else 0.0


def machines(cluster: Cluster, warn: Callable[[str], None]) -> list[Machine]:
    """The nodes, with what the pods of all namespaces have; of this namespace if others may not be listed."""
    found: dict[str, Machine] = {}
    for node in cluster.items("/api/v1/nodes"):
        meta, status = node["metadata"], node.get("status") or {}
        addresses = {it["type"]: it["address"] for it in reversed(status.get("addresses") or ())}
        found[meta["name"]] = Machine(
            meta["name"], _state(node), status.get("allocatable") or {}, meta.get("labels") or {},
            address=addresses.get("InternalIP", ""),
        )  # fmt: skip
    running = "status.phase!=Succeeded,status.phase!=Failed"
    try:
        _add(found, cluster, "/api/v1/pods", running)
    except ApiError as error:
        if error.code != 403:
            raise
        warn(f"you may not list pods outside namespace {cluster.namespace}; what they have is not counted")
        _add(found, cluster, cluster.path("v1", "pods"), running)
    return [found[name] for name in sorted(found)]


def _add(found: Mapping[str, Machine], cluster: Cluster, path: str, selector: str) -> None:
    for pod in cluster.items(path, fieldSelector=selector):
        machine = found.get(pod["spec"].get("nodeName") or "")
        if machine is None or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        for name, size in requests(pod).items():
            machine.requested[name] = machine.requested.get(name, 0.0) + size
            if name == cluster.gpu_resource and size:
                meta = pod["metadata"]
                owner = (meta.get("labels") or {}).get(INSTANCE) or f"{meta.get('namespace')}/{meta['name']}"
                machine.gpus[owner] = machine.gpus.get(owner, 0) + int(size)


def requests(pod: Object) -> dict[str, float]:
    """Resource → how much a pod requests."""
    found: dict[str, float] = {}
    for container in pod["spec"].get("containers") or ():
        given = container.get("resources") or {}
        for name, size in {**(given.get("limits") or {}), **(given.get("requests") or {})}.items():
            found[name] = found.get(name, 0.0) + amount(size)
    return found


def _state(node: Object) -> str:
    conditions = {it["type"]: it for it in (node.get("status") or {}).get("conditions") or ()}
    ready = conditions.get("Ready") or {}
    states = []
    if ready.get("status") != "True":
        states.append("not ready")
    if (node.get("spec") or {}).get("unschedulable"):
        states.append("cordoned")
    states += [kind for kind, it in conditions.items() if kind.endswith("Pressure") and it.get("status") == "True"]
    return ", ".join(states) or "ready"


def gpus_of(machine: Machine, resource: str) -> int:
    """How many GPUs a node has for pods."""
    return int(amount(machine.allocatable.get(resource)))


def nodes(cluster: Cluster, warn: Callable[[str], None]) -> list[Node]:
    """The nodes as `paceline top node` shows them.

    The cores and the memory in use are what metrics-server measures, and what pods have requested where it is missing.
    """
    found = []
    measure = partial(_measured, cluster, "/apis/metrics.k8s.io/v1beta1/nodes")
    used, there = cluster.at_once(measure, partial(machines, cluster, warn))
    if used is None:
        warn(f"{_UNMEASURED}; CPU and MEMORY are what pods have requested")
    by_name = {it["metadata"]["name"]: it.get("usage") or {} for it in used or ()}
    for machine in there:
        measured = by_name.get(machine.name)
        in_use = machine.requested if measured is None else {name: amount(it) for name, it in measured.items()}
        roles = (label.removeprefix(_ROLE) for label in machine.labels if label.startswith(_ROLE))
        found.append(Node(
            name=machine.name, address=machine.address, roles=tuple(sorted(filter(None, roles))),
            devices=(), allocated={}, device_count=gpus_of(machine, cluster.gpu_resource),
            allocated_count=machine.allocated_gpus, jobs=dict(machine.gpus),
            cores=amount(machine.allocatable.get("cpu")), load=in_use.get("cpu", 0.0),
            memory=int(amount(machine.allocatable.get("memory"))), memory_used=int(in_use.get("memory", 0)),
            disk=int(amount(machine.allocatable.get("ephemeral-storage"))),
            disk_used=int(machine.requested.get("ephemeral-storage", 0)), state=machine.state,
            measured=measured is not None,
        ))  # fmt: skip
    return found


def _measured(cluster: Cluster, path: str, **query: str) -> Sequence[Object] | None:
    """What metrics-server says; None where it does not answer."""
    try:
        return cluster.get(path, **query).get("items") or ()
    except ApiError as error:
        if error.code not in (403, 404, 503):
            raise
        return None


def usage(cluster: Cluster, names: Sequence[str], warn: Callable[[str], None]) -> dict[str, Usage]:
    """What the pods of these jobs use, as metrics-server measures it; nothing where it is not installed."""
    path = f"/apis/metrics.k8s.io/v1beta1/namespaces/{cluster.namespace}/pods"
    items = _measured(cluster, path, labelSelector=SELECTOR)
    if items is None:
        warn(f"{_UNMEASURED}; what pods use is not known")
        return {}
    found: dict[str, Usage] = {}
    for item in items:
        name = str((item["metadata"].get("labels") or {}).get(INSTANCE))
        if name not in names:
            continue
        use = {"cpu": 0.0, "memory": 0.0}
        for container in item.get("containers") or ():
            for key in use:
                use[key] += amount((container.get("usage") or {}).get(key))
        before = found.get(name, Usage(0, 0.0, 0))
        found[name] = Usage(0, before.cpu + use["cpu"], before.memory + int(use["memory"]))
    return found


def volumes(cluster: Cluster) -> list[Volume]:
    """The PersistentVolumeClaims of the namespace, which jobs can use with --data."""
    found = []
    for claim in cluster.items(cluster.path("v1", "persistentvolumeclaims")):
        meta, status = claim["metadata"], claim.get("status") or {}
        marks = {**(meta.get("labels") or {}), **(meta.get("annotations") or {})}
        size = (status.get("capacity") or claim["spec"].get("resources", {}).get("requests") or {}).get("storage")
        phase = status.get("phase", "Pending")
        found.append(Volume(
            meta["name"], path=claim["spec"].get("volumeName") or "", size=int(amount(size)) if size else None,
            problem=None if phase == "Bound" else f"it is {phase.lower()}",
            access=tuple(status.get("accessModes") or claim["spec"].get("accessModes") or ()),
            owner=marks.get("owner") or marks.get("app.kubernetes.io/created-by"),
            created=moment(meta.get("creationTimestamp")),
        ))  # fmt: skip
    return sorted(found, key=lambda volume: volume.name)
