"""What a request must pass before it is stored: service accounts, priority classes, pod security, quotas."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from . import defaults, quantity, resources
from .errors import Object, forbidden

if TYPE_CHECKING:
    from .resources import Resource
    from .storage import Storage

_TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"


def admit(storage: Storage, resource: Resource, object: Object) -> None:
    """Complete a new object, or refuse it.

    Raises:
        StatusError: 403.
    """
    if resource is resources.PODS:
        _account(storage, object)
        _priority(storage, object)
        tolerations = object["spec"].setdefault("tolerations", [])
        for key in ("not-ready", "unreachable"):
            full = f"node.kubernetes.io/{key}"
            if not any(one.get("key") in (full, None) and one.get("operator") == "Exists" for one in tolerations):
                tolerations.append({"key": full, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300})
        _security(storage, object)
    _quota(storage, resource, object)


def _account(storage: Storage, pod: Object) -> None:
    spec, namespace = pod["spec"], pod["metadata"]["namespace"]
    name = spec.setdefault("serviceAccountName", "default")
    spec["serviceAccount"] = name
    account = storage.get(resources.ACCOUNTS, namespace, name)
    if account is None:
        why = f'error looking up service account {namespace}/{name}: serviceaccount "{name}" not found'
        raise forbidden(resources.PODS, pod["metadata"]["name"], why)
    mount = spec.get("automountServiceAccountToken", account.get("automountServiceAccountToken", True))
    containers = [*(spec.get("initContainers") or []), *spec["containers"]]
    if not mount or any(v["name"].startswith("kube-api-access-") for v in spec.get("volumes") or []):
        return
    volume = f"kube-api-access-{defaults.suffix()}"
    namespace_item = {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}
    sources = [
        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [namespace_item]}},
    ]
    spec.setdefault("volumes", []).append({"name": volume, "projected": {"sources": sources, "defaultMode": 420}})
    for container in containers:
        mounts = container.setdefault("volumeMounts", [])
        if not any(one["mountPath"] == _TOKEN_FOLDER for one in mounts):
            mounts.append({"name": volume, "readOnly": True, "mountPath": _TOKEN_FOLDER})


def _priority(storage: Storage, pod: Object) -> None:
    name = pod["spec"].get("priorityClassName")
    found = storage.get(resources.PRIORITIES, "", name) if name else None
    if name and found is None:
        why = f"no PriorityClass with name {name} was found"
        raise forbidden(resources.PODS, pod["metadata"]["name"], why)
    pod["spec"]["priority"] = found["value"] if found else 0
    pod["spec"].setdefault("preemptionPolicy", (found or {}).get("preemptionPolicy", "PreemptLowerPriority"))


def _security(storage: Storage, pod: Object) -> None:
    """Pod security admission: what the label of a namespace enforces, as far as the pods of jobs have to do with it."""
    namespace = storage.get(resources.NAMESPACES, "", pod["metadata"]["namespace"]) or {"metadata": {}}
    level = (namespace["metadata"].get("labels") or {}).get("pod-security.kubernetes.io/enforce", "privileged")
    spec, violations = pod["spec"], []
    own = spec.get("securityContext") or {}
    if level != "privileged" and spec.get("hostNetwork"):
        violations.append("host namespaces (hostNetwork=true)")
    for container in [*(spec.get("initContainers") or []), *spec["containers"]] if level == "restricted" else []:
        name, given = container["name"], container.get("securityContext") or {}
        both = {**own, **given}
        if given.get("allowPrivilegeEscalation") is not False:
            violations.append(
                f'allowPrivilegeEscalation != false (container "{name}" must set '
                "securityContext.allowPrivilegeEscalation=false)"
            )
        capabilities = given.get("capabilities") or {}
        if "ALL" not in (capabilities.get("drop") or ()) or set(capabilities.get("add") or ()) - {"NET_BIND_SERVICE"}:
            violations.append(
                f'unrestricted capabilities (container "{name}" must set securityContext.capabilities.drop=["ALL"])'
            )
        if both.get("runAsNonRoot") is not True:
            violations.append(
                f'runAsNonRoot != true (pod or container "{name}" must set securityContext.runAsNonRoot=true)'
            )
        if (both.get("seccompProfile") or {}).get("type") not in ("RuntimeDefault", "Localhost"):
            violations.append(
                f'seccompProfile (pod or container "{name}" must set securityContext.seccompProfile.type to '
                '"RuntimeDefault" or "Localhost")'
            )
    if violations:
        why = f'violates PodSecurity "{level}:latest": {", ".join(dict.fromkeys(violations))}'
        raise forbidden(resources.PODS, pod["metadata"]["name"], why)


def usage(resource: Resource, object: Object) -> dict[str, Fraction]:
    """What an object takes of a quota."""
    taken = {f"count/{resource.qualified}": Fraction(1)}
    if resource.plural in ("configmaps", "secrets", "services", "persistentvolumeclaims"):
        taken[resource.plural] = Fraction(1)
    if resource is resources.PODS:
        if object.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            return taken
        taken["pods"] = Fraction(1)
        for name, value in quantity.requests(object["spec"]).items():
            taken[f"requests.{name}"] = value
            if name in ("cpu", "memory"):
                taken[name] = value
        for container in object["spec"]["containers"]:
            for name, text in ((container.get("resources") or {}).get("limits") or {}).items():
                key = f"limits.{name}"
                taken[key] = taken.get(key, Fraction(0)) + quantity.parse(text)
    return taken


def used(storage: Storage, resource: Resource, namespace: str) -> dict[str, Fraction]:
    """What all objects of a kind take in a namespace."""
    total: dict[str, Fraction] = {}
    for object in storage.all(resource, namespace):
        for name, value in usage(resource, object).items():
            total[name] = total.get(name, Fraction(0)) + value
    return total


def _quota(storage: Storage, resource: Resource, object: Object) -> None:
    namespace = object["metadata"].get("namespace", "")
    quotas = [quota for quota in storage.all(resources.QUOTAS, namespace)] if namespace else []
    if not quotas:
        return
    asked, taken = usage(resource, object), used(storage, resource, namespace)
    for quota in quotas:
        hard = (quota.get("spec") or {}).get("hard") or {}
        over = [
            name
            for name, value in asked.items()
            if name in hard and taken.get(name, Fraction(0)) + value > quantity.parse(hard[name])
        ]
        if over:

            def listed(of: dict[str, Fraction], over: list[str] = over) -> str:
                return ",".join(f"{name}={quantity.show(of.get(name, Fraction(0)))}" for name in sorted(over))

            limits = ",".join(f"{name}={hard[name]}" for name in sorted(over))
            why = f"exceeded quota: {quota['metadata']['name']}, requested: {listed(asked)}, used: {listed(taken)}"
            raise forbidden(resource, object["metadata"]["name"], f"{why}, limited: {limits}")
