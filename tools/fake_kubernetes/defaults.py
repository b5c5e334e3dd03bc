"""What the server adds to an object when it is created."""

from __future__ import annotations

import random
import uuid
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import Object
    from .resources import Resource

LONGEST = 58  # letters of a generateName that count: with the suffix it is a DNS label
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


def now() -> str:
    """The time as objects have it, in whole seconds."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def suffix() -> str:
    """Five letters, as the server appends to a generateName."""
    return "".join(random.choices(_LETTERS, k=5))


def metadata(object: Object) -> None:
    """Name, identity and time of a new object."""
    data = object["metadata"]
    if not data.get("name") and data.get("generateName"):
        data["name"] = data["generateName"][:LONGEST] + suffix()
    data["uid"] = str(uuid.uuid4())
    data["creationTimestamp"] = now()
    for name in ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds", "managedFields", "selfLink"):
        data.pop(name, None)


def fill(resource: Resource, object: Object, minor: int) -> None:
    """Fill in the defaults of a kind."""
    kind = resource.qualified
    if kind == "jobs.batch":
        _job(object, minor)
    elif kind == "pods":
        pod_spec(object["spec"])
    elif kind in ("deployments.apps", "replicasets.apps"):
        object["spec"].setdefault("replicas", 1)
        pod_spec(object["spec"]["template"]["spec"])
    elif kind == "services":
        _service(object)
    elif kind == "secrets":
        object.setdefault("type", "Opaque")
        _encode(object)
    elif kind == "persistentvolumeclaims":
        object["spec"].setdefault("volumeMode", "Filesystem")
    elif kind == "namespaces":
        object.setdefault("spec", {}).setdefault("finalizers", ["kubernetes"])


def new(resource: Resource, object: Object, minor: int) -> None:
    """What a kind has in its first version only: its status, and what hangs on its identity."""
    kind, data = resource.qualified, object["metadata"]
    if resource.subresources and "status" in resource.subresources and not resource.custom:
        object["status"] = {}
    if "spec" in object and kind not in ("services", "configmaps"):
        data["generation"] = 1
    if kind == "pods":
        object["status"] = {"phase": "Pending", "qosClass": _qos(object["spec"])}
    elif kind == "namespaces":
        object["status"] = {"phase": "Active"}
        data.setdefault("labels", {})["kubernetes.io/metadata.name"] = data["name"]
    elif kind == "services":
        object["status"] = {"loadBalancer": {}}
    elif kind == "persistentvolumeclaims":
        object["status"] = {"phase": "Pending"}
    elif kind == "jobs.batch" and not object["spec"].get("manualSelector"):
        _select(object, minor)


def _select(job: Object, minor: int) -> None:
    """Give a job's pods the labels by which it finds them."""
    uid, name = job["metadata"]["uid"], job["metadata"]["name"]
    labels = {"controller-uid": uid, "job-name": name}
    if minor >= 27:
        labels.update({f"batch.kubernetes.io/{key}": value for key, value in list(labels.items())})
    job["metadata"].setdefault("labels", {}).update(labels)
    job["spec"]["template"].setdefault("metadata", {}).setdefault("labels", {}).update(labels)
    key = "batch.kubernetes.io/controller-uid" if minor >= 27 else "controller-uid"
    job["spec"]["selector"] = {"matchLabels": {key: uid}}


def _job(job: Object, minor: int) -> None:
    spec = job["spec"]
    if spec.get("completions") is None and spec.get("parallelism") is None:
        spec["completions"] = 1
    spec.setdefault("parallelism", 1)
    spec.setdefault("backoffLimit", 6)
    spec.setdefault("completionMode", "NonIndexed")
    spec.setdefault("suspend", False)
    if minor >= 29:
        spec.setdefault("podReplacementPolicy", "Failed" if spec.get("podFailurePolicy") else "TerminatingOrFailed")
    pod_spec(spec["template"].setdefault("spec", {}), restart="")


def pod_spec(spec: Object, restart: str = "Always") -> None:
    """Fill in the defaults of a pod."""
    if restart:
        spec.setdefault("restartPolicy", restart)
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    spec.setdefault("securityContext", {})
    spec.setdefault("schedulerName", "default-scheduler")
    if spec.get("serviceAccountName"):
        spec["serviceAccount"] = spec["serviceAccountName"]
    for container in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]:
        image = container.get("image", "")
        tag = image.rpartition("/")[2].partition(":")[2]
        latest = tag in ("", "latest") and "@" not in image
        container.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
        container.setdefault("resources", {})
        limits, asked = container["resources"].get("limits"), container["resources"].get("requests") or {}
        if limits:
            container["resources"]["requests"] = {**limits, **asked}
        for port in container.get("ports") or []:
            port.setdefault("protocol", "TCP")
        for variable in container.get("env") or []:
            reference = (variable.get("valueFrom") or {}).get("fieldRef")
            if reference:
                reference.setdefault("apiVersion", "v1")
    for volume in spec.get("volumes") or []:
        if set(volume) == {"name"}:
            volume["emptyDir"] = {}
        for kind in ("configMap", "secret", "projected", "downwardAPI"):
            if volume.get(kind) is not None:
                volume[kind].setdefault("defaultMode", 420)


def _service(service: Object) -> None:
    spec: dict[str, Any] = service.setdefault("spec", {})
    spec.setdefault("type", "ClusterIP")
    spec.setdefault("sessionAffinity", "None")
    for port in spec.get("ports") or []:
        port.setdefault("protocol", "TCP")
        port.setdefault("targetPort", port["port"])
    if spec["type"] != "ExternalName" and not spec.get("clusterIP"):
        spec["clusterIP"] = f"10.96.{random.randrange(256)}.{random.randrange(1, 255)}"
    spec.setdefault("clusterIPs", [spec.get("clusterIP", "None")])
    spec.setdefault("ipFamilies", ["IPv4"])
    spec.setdefault("ipFamilyPolicy", "SingleStack")
    spec.setdefault("internalTrafficPolicy", "Cluster")


def _encode(secret: Object) -> None:
    import base64

    for key, value in (secret.pop("stringData", None) or {}).items():
        secret.setdefault("data", {})[key] = base64.b64encode(value.encode()).decode()


def _qos(spec: Object) -> str:
    each = [container.get("resources") or {} for container in spec.get("containers") or []]
    if not any(one.get("limits") or one.get("requests") for one in each):
        return "BestEffort"
    whole = all({"cpu", "memory"} <= set(one.get("limits") or {}) for one in each)
    return "Guaranteed" if whole and all(one.get("requests") == one.get("limits") for one in each) else "Burstable"
