"""What a target on a Kubernetes cluster can set, and flags for one job."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from paceline.job.model import Model, Parsers
from paceline.job.quantities import memory

DEFAULT_GPU = "nvidia.com/gpu"
PORT = 29500  # at which the agents of a job meet, in pod 0


def _pairs(value: Any) -> Any:
    """`a=b,c=d` as a table."""
    if not isinstance(value, str):
        return value
    found = {}
    for pair in filter(None, value.split(",")):
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ValueError(f"{pair!r} is not NAME=VALUE; write for example disk=ssd,zone=a")
        found[name.strip()] = text.strip()
    return found


def _texts(value: Any) -> Any:
    """`a=b,c=d` as a table, whose values may have commas: a part without = belongs to the one before."""
    if not isinstance(value, str):
        return value
    found: dict[str, str] = {}
    for part in value.strip(",").split(","):
        if found and "=" not in part:
            found[[*found][-1]] += f",{part}"
        else:
            found.update(_pairs(part))
    return found


def _names(value: Any) -> Any:
    return [name for name in value.split(",") if name] if isinstance(value, str) else value


_TOLERATION = re.compile(r"(?P<key>[^=:]*)(=(?P<value>[^:]*))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?")


def _tolerations(value: Any) -> Any:
    """`key=value:NoSchedule,…` as Kubernetes writes tolerations; `all` tolerates every taint."""
    if not isinstance(value, str):
        return value
    return [_toleration(text) for text in value.split(",") if text]


def _toleration(text: str) -> dict[str, str]:
    if text == "all":
        return {"operator": "Exists"}
    match = _TOLERATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not KEY[=VALUE][:EFFECT]; write for example gpu=true:NoSchedule")
    found = {"key": match["key"], "operator": "Exists" if match["value"] is None else "Equal"}
    if match["value"] is not None:
        found["value"] = match["value"]
    return {**found, "effect": match["effect"]} if match["effect"] else found


def _template(value: Any) -> Any:
    """A YAML file, or YAML itself, as a table."""
    if not isinstance(value, str):
        return value
    import os

    import yaml

    from paceline.job.yaml_files import load

    text = value
    if not value.lstrip().startswith("{"):
        try:
            with open(os.path.expanduser(value), encoding="utf-8") as file:
                text = file.read()
        except OSError as error:
            raise ValueError(f"cannot read {value}: {error.strerror}; name a YAML file") from None
    try:
        found = load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{value} is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{value} is not a pod template; write for example a file with spec: …")
    return found


TOPOLOGIES = {
    "host": "kubernetes.io/hostname", "zone": "topology.kubernetes.io/zone", "region": "topology.kubernetes.io/region",
}  # fmt: skip
_LABEL = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def _topology(value: Any) -> Any:
    if isinstance(value, str) and value not in TOPOLOGIES and ("/" not in value or not _LABEL.fullmatch(value)):
        known = ", ".join(TOPOLOGIES)
        raise ValueError(f"{value!r} is none of {known}; for racks, name their label of nodes: x.org/rack")
    return value


def _user(value: Any) -> Any:
    if value is not None and not re.fullmatch(r"image|[0-9]{1,10}(:[0-9]{1,10})?", str(value)):
        raise ValueError(f"{value!r} is neither UID, UID:GID nor image; write for example 1000:1000")
    return value if value is None else str(value)


def _capabilities(value: Any) -> Any:
    names = [name.upper().removeprefix("CAP_") for name in _names(value)]
    for name in names:
        if not re.fullmatch(r"[A-Z_]+", name):
            raise ValueError(f"{name!r} is no capability; write for example CHOWN,DAC_OVERRIDE, or default")
    if "DEFAULT" in names and len(names) > 1:
        raise ValueError("default goes with no other; leave it out, or the others")
    return names


def _valid_size(value: Any) -> Any:
    if isinstance(value, str):
        memory(value)
    return value


class Options(Model, frozen=True, kw_only=True):
    """The keys of a target other than `backend`; flags can set them too.

    Attributes:
        kind: the kind of object that a job becomes.
        gang: this scheduler starts the pods of a job together, or none of them.
        clean_pods: which pods go when a job ends, for kinds with a cleanPodPolicy.
    """

    context: str | None = None  # of the kubeconfig; the default is its current one
    namespace: str | None = None  # the default is that of the context
    kubeconfig: str | None = None  # the file; the default is that of kubectl
    image: str | None = None  # of jobs that name none
    python: str = "python3"  # the interpreter in the image
    kind: Literal["job", "pytorchjob", "mpijob", "tfjob", "paddlejob", "trainjob", "jobset"] = "job"
    worker_image: str | None = None  # of all pods but the first, for kinds with two roles
    gang: Literal["volcano", "coscheduling"] | None = None
    runtime: str = "torch-distributed"  # the ClusterTrainingRuntime of a TrainJob
    clean_pods: Literal["none", "running", "all"] | None = None
    plain: bool = False  # run the command itself, with the environment alone; no agent
    gpu_resource: str = DEFAULT_GPU  # what --gpus counts
    resources: dict[str, str] = {}  # more resources of each pod, such as rdma/hca = 1
    shm: str | None = None  # size of /dev/shm; the default is as much as the memory allows
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None  # of the image
    pull_secrets: list[str] = []  # Secrets with which the image is pulled
    git_image: str | None = None  # fetches code by git; the default is that of the job
    git_secret: str | None = None  # Secret with the password or the ssh key for git
    selector: dict[str, str] = {}  # labels of the nodes that the pods may run on
    tolerations: list[dict[str, Any]] = []  # taints that the pods tolerate
    placement: Literal["spread", "pack"] | None = None  # prefer a node for each pod, or few nodes for all
    topology: str = "host"  # what is meant by a node there: host, zone, region, or the label of nodes that names theirs
    run_as: str | None = None  # UID or UID:GID of all processes; "image": the image's user, who must not be root
    capabilities: list[str] = []  # those that containers get; "default": what the nodes give all containers
    work_size: str | None = None  # how much a pod may write to its own folder
    priority_class: str | None = None  # PriorityClass of the pods
    service_account: str | None = None  # ServiceAccount of the pods; the default is none
    annotations: dict[str, str] = {}  # more annotations of job and pods
    host_network: bool = False  # the pods use the network of their nodes
    ports: list[int] = []  # ports that containers declare
    pod_template: dict[str, Any] = {}  # is merged into the pod template: a YAML file, or a table

    parsers: ClassVar[Parsers] = {
        "resources": _pairs, "pull_secrets": _names, "selector": _pairs, "tolerations": _tolerations,
        "topology": _topology, "run_as": _user, "capabilities": _capabilities, "work_size": _valid_size,
        "annotations": _texts, "ports": _names, "pod_template": _template, "shm": _valid_size,
    }  # fmt: skip
