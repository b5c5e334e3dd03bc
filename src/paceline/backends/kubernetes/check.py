"""What a cluster has and allows: `paceline check`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from paceline.backends.check.report import Finding, Report, errors_first
from paceline.job.errors import UserError
from paceline.node.readers import at_once

from .api.errors import RUN_AS, ApiError
from .api.rights import may
from .change import queues
from .manifests.gang import GROUPS
from .manifests.kinds.served import served
from .manifests.manifest import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backends.kubernetes.api.object import Object

    from .api.client import Cluster
    from .options import Options

_LEAST = (1, 24)
_AT_ONCE = 8  # questions
_POD_SECURITY, _MODES = "pod-security.kubernetes.io/", ("enforce", "warn", "audit")  # labels of a namespace
_UNKNOWN = "YOUR-USER"


class Right(NamedTuple):
    """A permission that paceline uses.

    Attributes:
        group: of the API; "" for the core.
        resource: such as pods/log.
        verbs: that it needs.
        why: what does not work without it.
        is_needed: whether no job can run without it.
        is_global: it is not of a namespace.
    """

    group: str
    resource: str
    verbs: tuple[str, ...]
    why: str
    is_needed: bool = True
    is_global: bool = False


_OF_JOBS = ("get", "list", "watch", "create", "patch", "delete")
RIGHTS = (
    Right("batch", "jobs", _OF_JOBS, "no job can be started or seen"),
    Right("", "pods", ("get", "list"), "what a job's pods do is not known"),
    Right("", "pods", ("delete",), "paceline stop --now cannot end pods at once", is_needed=False),
    Right("", "pods", ("watch",), "list -w and get -w list the pods every two seconds", is_needed=False),
    Right("", "pods", ("create",), "logs that are kept on a volume cannot be read when no pod runs", is_needed=False),
    Right("", "pods/log", ("get",), "paceline logs shows nothing"),
    Right("", "services", ("create", "get", "delete"), "no job can be started"),
    Right("", "configmaps", ("create", "get", "list", "delete"), "no job can be started"),
    Right("", "secrets", ("create", "get", "delete"), "no job with several nodes or with secrets can be started"),
    Right("", "events", ("list", "watch"), "why a pod waits is known less well", is_needed=False),
    Right("", "pods/exec", ("create", "get"), "paceline attach does not work", is_needed=False),
    Right("", "pods/portforward", ("create", "get"), "paceline tensorboard cannot reach it", is_needed=False),
    Right("", "persistentvolumeclaims", ("list",), "paceline data list does not work", is_needed=False),
    Right("", "persistentvolumeclaims", ("get",), "claims that are missing are not noticed at submit", is_needed=False),
    Right("", "resourcequotas", ("list",), "paceline check cannot show quotas", is_needed=False),
    Right("", "namespaces", ("get",), "which pods it admits is not known before they start", is_needed=False),
    Right("", "nodes", ("list",), "paceline top node does not work", is_needed=False, is_global=True),
    Right("", "pods", ("list",), "what pods of other namespaces have is not counted", is_needed=False, is_global=True),
)
KINDS = {
    "jobset.x-k8s.io": "JobSet",
    "kubeflow.org": "Kubeflow Training Operator or MPI Operator",
    "trainer.kubeflow.org": "Kubeflow Trainer",
    "kueue.x-k8s.io": "Kueue",
    "scheduling.volcano.sh": "Volcano",
    "scheduling.x-k8s.io": "coscheduling",
    "metrics.k8s.io": "metrics-server",
}


def check(cluster: Cluster, options: Options) -> Report:
    """What the cluster has and allows, and what would go wrong with a job that sets no option."""
    major, minor = cluster.version
    found: list[Finding] = []
    access = cluster.access
    version = str(cluster.get("/version").get("gitVersion", f"v{major}.{minor}"))
    sections: dict[str, list[tuple[str, str]]] = {
        "Cluster": [
            ("context", access.context), ("server", access.server), ("namespace", access.namespace),
            ("version", version),
        ]
    }  # fmt: skip
    sections["Cluster"] += _pod_security(cluster, options, found)
    if (major, minor) < _LEAST:
        found.append(Finding("error", "the cluster", f"is Kubernetes {version}", "use one of 1.24 or newer"))
    denied = _denied(cluster)
    sections["Permissions"] = _permissions(rights(cluster), denied)
    for right, verbs in denied:
        scope = "the cluster" if right.is_global else f"namespace {access.namespace}"
        what = f"does not let you {', '.join(verbs)} {_titled(right)}: {right.why}"
        do = "apply the ClusterRole below" if right.is_global else "apply the Role below"
        found.append(Finding("error" if right.is_needed else "warning", scope, what, do))
    sections["Nodes"] = _nodes(cluster, found)
    sections["Quotas"] = _quotas(cluster)
    sections["Volumes"] = _claims(cluster)
    sections["Installed"] = _installed(cluster)
    shown = {title: rows for title, rows in sections.items() if rows}
    return Report(shown, errors_first(found), role(cluster, denied), "What grants the rest (kubectl apply -f)")


# -- permissions -------------------------------------------------------------------------------------------------------


def _denied(cluster: Cluster) -> list[tuple[Right, list[str]]]:
    """The permissions that this user lacks, each with the verbs."""
    questions = [(right, verb) for right in rights(cluster) for verb in right.verbs]
    cluster.access  # noqa: B018  # before the threads ask, so that it is made once
    answers = at_once(lambda it: _may(cluster, *it), questions, _AT_ONCE)
    found: dict[Right, list[str]] = {}
    for (right, verb), is_allowed in zip(questions, answers, strict=True):
        if not is_allowed:
            found.setdefault(right, []).append(verb)
    return list(found.items())


def rights(cluster: Cluster) -> list[Right]:
    """The permissions that paceline uses in a cluster, those for the kinds that operators have brought too."""
    kinds = [kind for kind in served(cluster) if kind.name != "job"]
    found = [Right(it.group, it.plural, _OF_JOBS, f"--kind {it.name} does not work", is_needed=False) for it in kinds]
    for gang, api_version in GROUPS.items():
        if cluster.serves(api_version, "PodGroup"):
            group, verbs = api_version.partition("/")[0], ("create", "get", "delete")
            found.append(Right(group, "podgroups", verbs, f"--gang {gang} does not work", is_needed=False))
    if (workloads := queues.version(cluster)) is not None:
        why = "paceline stop refuses jobs with a queue"
        found.append(Right(workloads.partition("/")[0], "workloads", ("list", "get", "patch"), why, is_needed=False))
    return [*RIGHTS, *found]


def _may(cluster: Cluster, right: Right, verb: str) -> bool:
    return may(cluster, right.group, right.resource, verb, is_global=right.is_global)


def _full(right: Right) -> str:
    return f"{right.resource}.{right.group}" if right.group else right.resource


def _titled(right: Right) -> str:
    """What a permission is for, as a line of the report begins."""
    return f"{_full(right)} of all namespaces" if right.is_global and right.resource != "nodes" else _full(right)


def _permissions(asked: Sequence[Right], denied: Sequence[tuple[Right, list[str]]]) -> list[tuple[str, str]]:
    lacking: dict[str, list[str]] = {}
    for right, verbs in denied:
        lacking.setdefault(_titled(right), []).extend(verbs)
    rows = []
    for name in dict.fromkeys(map(_titled, asked)):
        verbs = [verb for right in asked if _titled(right) == name for verb in right.verbs]
        missing = lacking.get(name, ())
        allowed = ", ".join(verb for verb in verbs if verb not in missing)
        rows.append((name, f"{allowed or 'nothing'}; not {', '.join(missing)}" if missing else allowed))
    return rows


def role(cluster: Cluster, denied: Sequence[tuple[Right, list[str]]]) -> str:
    """The Roles that grant all that paceline uses, if some is missing; in YAML for `kubectl apply`."""
    manifests: list[Object] = []
    who = _user(cluster, denied) if denied else ""
    for is_global in (False, True):
        if not any(right.is_global == is_global for right, _ in denied):
            continue
        kind = "ClusterRole" if is_global else "Role"
        rules: dict[tuple[str, str], list[str]] = {}
        for right in rights(cluster):
            if right.is_global == is_global:
                rules.setdefault((right.group, right.resource), []).extend(right.verbs)
        meta: Object = {"name": "paceline"} if is_global else {"name": "paceline", "namespace": cluster.namespace}
        api = "rbac.authorization.k8s.io"
        listed = [{"apiGroups": [g], "resources": [r], "verbs": verbs} for (g, r), verbs in rules.items()]
        subject = {"kind": "User", "name": who, "apiGroup": api}
        manifests += [
            {"apiVersion": f"{api}/v1", "kind": kind, "metadata": meta, "rules": listed},
            {
                "apiVersion": f"{api}/v1", "kind": f"{kind}Binding", "metadata": meta, "subjects": [subject],
                "roleRef": {"kind": kind, "name": "paceline", "apiGroup": api},
            },
        ]  # fmt: skip
    return text(manifests) if manifests else ""


def _user(cluster: Cluster, denied: Sequence[tuple[Right, list[str]]]) -> str:
    """The name by which the cluster knows this user: it says it when asked (from 1.28 on), or in a refusal."""
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    try:
        answer = cluster.create("/apis/authentication.k8s.io/v1/selfsubjectreviews", review)
        found = str(((answer.get("status") or {}).get("userInfo") or {}).get("username") or _UNKNOWN)
    except ApiError:
        found = next((_refused(cluster, right) for right, verbs in denied if "list" in verbs), _UNKNOWN)
    return _UNKNOWN if found == "system:anonymous" else found


def _refused(cluster: Cluster, right: Right) -> str:
    """Whom the server refuses to list something."""
    root = f"/apis/{right.group}/v1" if right.group else "/api/v1"
    where = "" if right.is_global else f"/namespaces/{cluster.namespace}"
    try:
        cluster.get(f"{root}{where}/{right.resource}", limit=1)
    except ApiError as error:
        match = re.search(r'[Uu]ser "([^"]+)"', str(error))
        return match[1] if match else _UNKNOWN
    return _UNKNOWN


# -- what there is -----------------------------------------------------------------------------------------------------


def _pod_security(cluster: Cluster, options: Options, found: list[Finding]) -> list[tuple[str, str]]:
    """Which pods the namespace admits, as its labels say."""
    try:
        labels = cluster.get(f"/api/v1/namespaces/{cluster.namespace}")["metadata"].get("labels") or {}
    except ApiError:
        return []  # the permission that is missing is named
    rows = [(f"pods: {mode}", labels[_POD_SECURITY + mode]) for mode in _MODES if _POD_SECURITY + mode in labels]
    enforced, where = labels.get(f"{_POD_SECURITY}enforce"), f"namespace {cluster.namespace}"
    if enforced == "restricted" and options.run_as is None:
        what = "admits no pods that may run as root (pod security: restricted)"
        found.append(Finding("error", where, what, RUN_AS))
    if enforced == "restricted" and options.capabilities:
        what = "admits no pods with capabilities (pod security: restricted)"
        found.append(Finding("error", where, what, "leave out --capabilities"))
    if enforced in ("restricted", "baseline") and options.host_network:
        what = f"admits no pods with the network of their node (pod security: {enforced})"
        found.append(Finding("error", where, what, "leave out --host-network"))
    return rows


def _nodes(cluster: Cluster, found: list[Finding]) -> list[tuple[str, str]]:
    from .look.machines import gpus_of, machines

    try:
        those = machines(cluster, lambda _: None)  # the permission that is missing is named
    except ApiError:
        return []
    rows = []
    for machine in those:
        count = gpus_of(machine, cluster.gpu_resource)
        product = machine.labels.get("nvidia.com/gpu.product")
        what = f"{count} GPUs{f' ({product})' if product else ''}, {machine.allocated_gpus} allocated"
        rows.append((machine.name, f"{machine.state}; {what if count else 'no GPUs'}"))
    if not any(machine.state == "ready" for machine in those):
        found.append(Finding("error", "the cluster", "has no node that is ready for pods", "see kubectl get nodes"))
    return rows


def _quotas(cluster: Cluster) -> list[tuple[str, str]]:
    rows = []
    for quota in _items(cluster, "resourcequotas"):
        status = quota.get("status") or {}
        used = status.get("used") or {}
        for name, hard in (status.get("hard") or {}).items():
            rows.append((f"{quota['metadata']['name']}: {name}", f"{used.get(name, '0')} of {hard} used"))
    return rows


def _claims(cluster: Cluster) -> list[tuple[str, str]]:
    rows = []
    for claim in _items(cluster, "persistentvolumeclaims"):
        status = claim.get("status") or {}
        size = (status.get("capacity") or {}).get("storage", "size unknown")
        modes = ", ".join(claim["spec"].get("accessModes") or ())
        rows.append((claim["metadata"]["name"], f"{status.get('phase', 'Pending')}, {size}, {modes}"))
    return rows


def _items(cluster: Cluster, plural: str) -> list[Object]:
    try:
        return [item for page in cluster.list(cluster.path("v1", plural)) for item in page["items"]]
    except ApiError:
        return []


def _installed(cluster: Cluster) -> list[tuple[str, str]]:
    try:
        groups = cluster.get("/apis").get("groups") or ()
    except UserError:
        return []
    rows = []
    for group in groups:
        if group["name"] in KINDS:
            versions = ", ".join(version["version"] for version in group.get("versions") or ())
            rows.append((KINDS[group["name"]], f"{group['name']} {versions}"))
    return rows
