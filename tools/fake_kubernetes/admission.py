"""What a request must pass before it is stored: service accounts, priority classes, limits, pod security, quotas."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from . import defaults, podsecurity, quantity, resources
from .errors import Object, forbidden

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .resources import Resource
    from .storage import Storage

_TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"


def admit(storage: Storage, resource: Resource, object: Object) -> list[str]:
    """Complete a new object, or refuse it; returns what the server warns of.

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
        _limits(storage, object)
    warnings = podsecurity.check(storage, resource, object)
    _quota(storage, resource, object)
    return warnings


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


def _limits(storage: Storage, pod: Object) -> None:
    """The LimitRanges of the namespace: what containers get that ask for nothing, and what they may ask for.

    Source: plugin/pkg/admission/limitranger/admission.go.
    """
    wrong: list[str] = []
    for found in storage.all(resources.LIMIT_RANGES, pod["metadata"]["namespace"]):
        for rule in found["spec"].get("limits") or []:
            if rule["type"] != "Container":
                continue
            least, most = rule.get("min") or {}, rule.get("max") or {}
            usual = {**most, **(rule.get("default") or {})}
            asked = {**least, **usual, **(rule.get("defaultRequest") or {})}
            for container in [*(pod["spec"].get("initContainers") or []), *pod["spec"]["containers"]]:
                own = container.setdefault("resources", {})
                limits = {**usual, **(own.get("limits") or {})}
                requests = {**asked, **(own.get("limits") or {}), **(own.get("requests") or {})}
                own.update({key: value for key, value in (("limits", limits), ("requests", requests)) if value})
                wrong += _beyond("minimum", least, -1, (("request", requests), ("limit", limits)))
                wrong += _beyond("maximum", most, 1, (("limit", limits), ("request", requests)))
    if wrong:
        words = wrong[0] if len(wrong) == 1 else f"[{', '.join(wrong)}]"
        raise forbidden(resources.PODS, pod["metadata"]["name"], words)


def _beyond(word: str, bounds: Object, sign: int, asked: tuple[tuple[str, Object], ...]) -> Iterator[str]:
    """What a container asks for that is beyond the bounds of a LimitRange."""
    for name, bound in bounds.items():
        for kind, values in asked:
            if name in values and sign * (quantity.parse(values[name]) - quantity.parse(bound)) > 0:
                yield f"{word} {name} usage per Container is {bound}, but {kind} is {values[name]}"
                break


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


_COMPUTE = ("cpu", "memory", "requests.cpu", "requests.memory", "limits.cpu", "limits.memory")


def _unsaid(pod: Object, hard: Object) -> str:
    """What a quota counts and containers do not say: `limits.cpu for: main; memory for: main`.

    Source: pkg/quota/v1/evaluator/core/pods.go.
    """
    found: dict[str, list[str]] = {}
    for container in [*pod["spec"]["containers"], *(pod["spec"].get("initContainers") or [])]:
        asked = container.get("resources") or {}
        for name in sorted(name for name in hard if name in _COMPUTE):
            kind, _, what = name.rpartition(".")
            if what not in (asked.get(kind or "requests") or {}):
                found.setdefault(name, []).append(container["name"])
    return "; ".join(f"{name} for: {','.join(names)}" for name, names in sorted(found.items()))


def _quota(storage: Storage, resource: Resource, object: Object) -> None:
    namespace = object["metadata"].get("namespace", "")
    quotas = [quota for quota in storage.all(resources.QUOTAS, namespace)] if namespace else []
    if not quotas:
        return
    asked, taken = usage(resource, object), used(storage, resource, namespace)
    for quota in quotas:
        hard = (quota.get("spec") or {}).get("hard") or {}
        if resource is resources.PODS and (missing := _unsaid(object, hard)):
            why = f"failed quota: {quota['metadata']['name']}: must specify {missing}"
            raise forbidden(resource, object["metadata"]["name"], why)
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
