"""The objects of a job in a cluster, as manifests. Pure: nothing here talks to a server.

A job is one object, such as a Job; `kinds` makes it. It owns all else, so that whatever becomes of the client, nothing
is left when it is gone:

- a Service gives pods names, at which the agents meet;
- ConfigMaps have the archive of paceline, the node's part of the job, and its code, in pieces;
- a Secret has the user's secrets, and the token with which the agents authenticate each other.
"""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline._version import __version__
from paceline.backends.kubernetes.options import PORT, TOPOLOGIES
from paceline.contract import nodejob
from paceline.job.errors import UserError
from paceline.node.host.pod_format import FIRST_POD

from . import cloning, replacing
from .bootstrap import START
from .gang import mark, pod_groups
from .manifest import literal, merged, quantity
from .names import FIRST_NODE, GROUP, INJECT, INSTANCE, JOB_ID, LABELS, LOGS, QUEUE, SPEC, labels_of, users_labels
from .order import ALL, Order, Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.backends.kubernetes.api.object import Object
    from paceline.backends.kubernetes.options import Options
    from paceline.job.spec import JobSpec


FOLDER = "/paceline"
HERE, WORK = f"{FOLDER}/job", f"{FOLDER}/work"  # what the pod gets, and where it writes
PACKAGE = f"{WORK}/package"  # where the archive is unpacked
ROOT = f"{WORK}/jobs"
PROGRAM = f"{HERE}/start.py"  # of the pods of a job with agents
MESSAGE = "/dev/termination-log"
CONTAINER = "main"
VOLUMES = ("shm", "job", "work")  # of every pod; what is there goes with it
MOST_BYTES = 1_000_000  # in a ConfigMap, whose limit is 1 MiB with all its keys
MOST_APPLIED = 180_000  # the same, if kubectl apply is to take it: it notes all of it in an annotation of up to 256 KiB
MANY = 12  # ConfigMaps; code that needs more is sent in larger ones
MOST_CODE = 16 << 20  # bytes of code, packed
_END_SECONDS = 15  # beyond the grace of the ranks, for the agent to report
POD = "PACELINE_POD"  # the variable with a pod's number in its role, unless a controller sets one


# -- the whole job -----------------------------------------------------------------------------------------------------


def metadata(order: Order) -> Object:
    """The metadata of the object that owns all else."""
    found = meta(order)
    if order.is_queued:
        found["labels"][QUEUE] = order.spec.queue
    found["annotations"] = {
        **order.options.annotations,
        SPEC: json.dumps(order.spec.stored(only_given=True) | {"name": order.name}),
        JOB_ID: order.job_id,
        LABELS: json.dumps(dict(order.spec.labels)),
        f"{GROUP}/version": __version__,
    }
    if order.record is not None:
        found["annotations"][f"{GROUP}/code"] = json.dumps(dict(order.record))
    if (where := order.kept_logs()) is not None:
        found["annotations"][LOGS] = json.dumps(where._asdict())
    return found


def dependents(order: Order) -> list[Object]:
    """What the object of a job owns, besides the Services of its kind; without the references to it."""
    found = [*config_maps(order), *pod_groups(order, meta(order))]
    if order.secrets:
        found.append(_secret(order))
    if order.clone is not None:
        found += cloning.secrets(order.clone, meta(order, order.clone.secret))
    return found


def owned(manifest: Object, owner: Mapping[str, Any]) -> Object:
    """A manifest with a reference to the object that owns it."""
    meta = owner["metadata"]
    reference = {
        "apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": meta["name"], "uid": meta["uid"],
        "controller": False, "blockOwnerDeletion": False,
    }  # fmt: skip
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [reference]}}


def meta(order: Order, name: str | None = None) -> Object:
    """Name, namespace and labels of an object of a job."""
    return {"name": name or order.name, "namespace": order.namespace, "labels": _labels(order)}


def _labels(order: Order) -> dict[str, str]:
    """The labels of the job, and those of its user."""
    return {**users_labels(order.spec.labels), **labels_of(order.name)}


def _secret(order: Order) -> Object:
    data = {name: base64.b64encode(_utf8(name, value)).decode() for name, value in order.secrets.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta(order), "type": "Opaque", "data": data}


def _utf8(name: str, value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise UserError(f"the secret {name} has bytes that are no UTF-8, which no pod gets; encode it") from None


# -- what the pods get -------------------------------------------------------------------------------------------------


def config_maps(order: Order) -> list[Object]:
    """The ConfigMaps with the job's files, each below the limit."""
    if not order.archive:
        return []
    texts = {"start.py": START.lstrip(), "part.json": json.dumps(request(order).to_json())}
    if order.clone is not None:
        texts["git.sh"] = cloning.GIT.lstrip()
    bins = split({"archive": order.archive, "code": order.code or b""}, sum(len(it.encode()) for it in texts.values()))
    found = []
    for number, files in enumerate(bins):
        data: Object = {"binaryData": {name: base64.b64encode(it).decode() for name, it in files.items()}}
        if number == 0:
            data["data"] = texts
        named = meta(order, f"{order.name}-files-{number}")
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": named, **data})
    return found


def split(files: Mapping[str, bytes], taken: int) -> list[dict[str, bytes]]:
    """Files in pieces, each called FILE-000, FILE-001, …, for as many ConfigMaps as they need."""
    total = sum(map(len, files.values()))
    most = MOST_APPLIED if total <= MANY * MOST_APPLIED else MOST_BYTES
    bins: list[dict[str, bytes]] = [{}]
    room = max(0, most - taken)
    for name, content in files.items():
        number = at = 0
        while at < len(content):
            if not room:
                bins.append({})
                room = most
            piece = content[at : at + room]
            bins[-1][f"{name}-{number:03}"] = piece
            at, number, room = at + len(piece), number + 1, room - len(piece)
    return bins


def request(order: Order) -> nodejob.BatchOrder:
    """What all pods read: each has its number as a variable."""
    spec, nodes, where = order.spec, order.nodes, order.kept_logs()
    job = replace(spec.for_node(order.name), data=(), options={}, resume_from=None, log_dir=None)
    if nodes > 1:
        main_port = spec.rendezvous.main_port or PORT
        job = replace(job, main_address=order.kind.address(order.name, 0), main_port=main_port)
    has_code = order.clone is not None or order.code is not None
    part = nodejob.Order(
        job=job,
        data=tuple(
            {"volume": it.volume, "path": it.path, "wanted": it.path, "variable": it.variable} for it in spec.data
        ),
        job_id=order.job_id,
        hosts=tuple(order.kind.host(order.name, number) for number in range(nodes)) if nodes > 1 else (),
        slots=spec.devices if isinstance(spec.devices, int) else 0,
        code=(order.record or {}) if has_code else None,
        peers=tuple(replacing.peers(order)),
    )
    return nodejob.BatchOrder(
        part,
        ROOT,
        archive="code.tar" if has_code and order.clone is None else None,
        cloned=cloning.FOLDER if order.clone is not None else None,
        kept_logs=None if where is None else where.folder,
        node_rank_variable=order.kind.index_variable if nodes > 1 else None,
        address_variable=replacing.ADDRESS,
        late_nodes=replacing.has_late_pods(order),
        ends_with_first=replacing.ends_with_first(order),
    )


# -- the pods ----------------------------------------------------------------------------------------------------------


def template(order: Order, role: Role = ALL) -> Object:
    """The pod template of a role, with the user's own one merged into it."""
    options, spec = order.options, order.spec
    pod: Object = {
        "subdomain": order.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(spec.grace) + _END_SECONDS,
        "enableServiceLinks": False,
        "automountServiceAccountToken": options.service_account is not None,
        "containers": [_container(order, role)],
        "volumes": _volumes(order),
    }
    if order.clone is not None:
        asked = resources(spec.changed({"devices": None}), options.changed({"resources": {}}))
        fetches = cloning.container(order.clone, HERE, WORK, asked, options.pull_policy)
        pod["initContainers"] = [{**fetches, "securityContext": _of_container(order)}]
        pod["volumes"] += cloning.volumes(order.clone)
    optional: Object = {
        "serviceAccountName": options.service_account,
        "imagePullSecrets": [{"name": name} for name in options.pull_secrets],
        "nodeSelector": dict(options.selector),
        "tolerations": [dict(toleration) for toleration in options.tolerations],
        **_placement(order.name, options),
        "securityContext": _of_pod(options),
        "priorityClassName": options.priority_class,
    }
    pod.update((key, value) for key, value in optional.items() if value)
    if options.host_network:
        pod.update(hostNetwork=True, dnsPolicy="ClusterFirstWithHostNet")
    # A sidecar would go on when the ranks have ended.
    marks: Object = {"labels": {INJECT: options.annotations.get(INJECT, "false"), **_labels(order)}}
    if role.first:
        marks["labels"][FIRST_NODE] = str(role.first)
    if options.annotations:
        marks["annotations"] = dict(options.annotations)
    made = {"metadata": marks, "spec": pod}
    mark(made, order)
    whole: Object = merged(made, options.pod_template)
    return whole


def _container(order: Order, role: Role) -> Object:
    options, spec = order.options, order.spec
    container: Object = {
        "name": order.kind.container,
        "image": (options.worker_image if role.first else None) or order.image,
        "command": command(order),
        "env": env(order, role),
        "resources": resources(spec, options),
        "volumeMounts": _mounts(order),
        "terminationMessagePath": MESSAGE,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if options.pull_policy is not None:
        container["imagePullPolicy"] = options.pull_policy
    ports = [] if options.plain or order.nodes == 1 else [spec.rendezvous.main_port or PORT]
    if declared := [*dict.fromkeys([*ports, *options.ports])]:
        container["ports"] = [{"containerPort": port} for port in declared]
    if options.plain and spec.working_dir != ".":
        container["workingDir"] = spec.working_dir
    if security := _of_container(order):
        container["securityContext"] = security
    return container


def _of_pod(options: Options) -> Object:
    """The security context of a pod: its user, and which calls of the kernel it may use."""
    found: Object = {} if options.plain else {"seccompProfile": {"type": "RuntimeDefault"}}
    if options.run_as is not None:
        user, _, group = options.run_as.partition(":")
        numbers = {} if user == "image" else {"runAsUser": int(user)}
        if group:
            numbers |= {"runAsGroup": int(group), "fsGroup": int(group)}  # volumes belong to it as well
        found |= {**numbers, "runAsNonRoot": user.strip("0") != ""}
    return found


def _of_container(order: Order) -> Object:
    """The security context of a container: what Kubernetes' "restricted" asks for.

    A command that runs itself may need more, such as the sshd of an MPIJob, and so gets what nodes give to all.
    """
    options = order.options
    added = [name for name in options.capabilities if name != "DEFAULT"]
    if any(name.startswith("rdma/") for name in options.resources):  # memory is pinned for RDMA
        added = [*dict.fromkeys([*added, "IPC_LOCK"])]
    capabilities: Object = {"add": added} if added else {}
    if options.plain or options.capabilities == ["DEFAULT"]:
        return {"capabilities": capabilities} if capabilities else {}
    return {"allowPrivilegeEscalation": False, "capabilities": {**capabilities, "drop": ["ALL"]}}


def command(order: Order) -> list[str]:
    """What the container runs."""
    spec = order.spec
    if not order.options.plain:
        return [order.options.python, PROGRAM, HERE, WORK, MESSAGE]
    python = [order.options.python]
    if spec.module is not None:
        words = [*python, "-m", spec.module, *spec.args]
    elif spec.script is not None:
        words = [*(python if spec.script.endswith(".py") else []), spec.script, *spec.args]
    else:
        words = [spec.command or "", *spec.args]
    return [literal(word) for word in words]


def env(order: Order, role: Role = ALL) -> list[Object]:
    """The variables of a role's container."""
    found: list[Object] = []
    if order.options.plain:
        if not order.kind.sets_variables:
            found += _meeting(order)
        found += [{"name": name, "value": literal(value)} for name, value in order.spec.env.items()]
    elif order.kind.index_variable == POD and order.nodes > 1:
        number = {"value": "0"} if role.index is None else {"valueFrom": {"fieldRef": {"fieldPath": role.index}}}
        found += [{"name": POD, **number}, {"name": FIRST_POD, "value": str(role.first)}]
    if order.options.run_as is not None and not order.options.plain:  # who may have no home, nor a name
        found += [{"name": name, "value": value} for name, value in (("HOME", WORK), ("USER", "paceline"))]
    found += replacing.variables(order)
    found += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": order.name, "key": name}}} for name in order.secrets
    ]
    return found


def _meeting(order: Order) -> list[Object]:
    """What torch.distributed reads, if nobody else sets it."""
    nodes, spec = order.nodes, order.spec
    field_path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return [
        {"name": "MASTER_ADDR", "value": order.kind.address(order.name, 0) if nodes > 1 else "127.0.0.1"},
        {"name": "MASTER_PORT", "value": str(spec.rendezvous.main_port or PORT)},
        {"name": "WORLD_SIZE", "value": str(nodes * ranks(spec))},
        {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": field_path}}},
    ]


def ranks(spec: JobSpec) -> int:
    """How many ranks each pod has, as far as that is known here."""
    return spec.ranks if isinstance(spec.ranks, int) else 1


def resources(spec: JobSpec, options: Options) -> Object:
    """What each pod requests, which is also its limit."""
    found: dict[str, str] = {}
    if spec.cpus is not None:
        found["cpu"] = str(spec.cpus)
    if spec.memory is not None:
        found["memory"] = quantity(spec.memory)
    if isinstance(spec.devices, int) and spec.devices:
        found[options.gpu_resource] = str(spec.devices)
    if options.work_size is not None:
        found["ephemeral-storage"] = options.work_size
    found.update(options.resources)
    return {"limits": found, "requests": dict(found)} if found else {}


def _volumes(order: Order) -> list[Object]:
    shm: Object = {"medium": "Memory"}
    if order.options.shm is not None:
        shm["sizeLimit"] = order.options.shm
    elif order.spec.memory is not None:  # what is there counts as memory of the pod
        shm["sizeLimit"] = quantity(order.spec.memory)
    work: Object = {} if order.options.work_size is None else {"sizeLimit": order.options.work_size}
    found: list[Object] = [{"name": "shm", "emptyDir": shm}]
    if not order.options.plain:
        names = [manifest["metadata"]["name"] for manifest in config_maps(order)]
        sources = [{"configMap": {"name": name}} for name in names]
        found += [{"name": "job", "projected": {"sources": sources}}, {"name": "work", "emptyDir": work}]
    for number, claim in enumerate(dict.fromkeys(mount.volume for mount in order.spec.data)):
        found.append({"name": f"data-{number}", "persistentVolumeClaim": {"claimName": claim}})
    return found


def _mounts(order: Order) -> list[Object]:
    found: list[Object] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if not order.options.plain:
        found += [{"name": "job", "mountPath": HERE, "readOnly": True}, {"name": "work", "mountPath": WORK}]
    claims = list(dict.fromkeys(mount.volume for mount in order.spec.data))
    found += [{"name": f"data-{claims.index(it.volume)}", "mountPath": it.path} for it in order.spec.data]
    return found


def _placement(name: str, options: Options) -> Object:
    """What the scheduler prefers for the pods of a job; it starts them elsewhere if that is not possible."""
    if options.placement is None:
        return {}
    these = {"labelSelector": {"matchLabels": {INSTANCE: name}}}
    key = TOPOLOGIES.get(options.topology, options.topology)
    if options.placement == "spread" and key != TOPOLOGIES["host"]:  # each of few zones gets as many pods
        return {
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "ScheduleAnyway", **these}
            ]
        }
    weighted = [{"weight": 100, "podAffinityTerm": {**these, "topologyKey": key}}]
    kind = "podAntiAffinity" if options.placement == "spread" else "podAffinity"
    return {"affinity": {kind: {"preferredDuringSchedulingIgnoredDuringExecution": weighted}}}
