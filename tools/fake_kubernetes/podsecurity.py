"""Pod security admission: what the labels of a namespace enforce, and what they only warn of.

Source: staging/src/k8s.io/pod-security-admission, policy and admission/admission.go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import resources
from .errors import Object, forbidden

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .resources import Resource
    from .storage import Storage

_LABEL = "pod-security.kubernetes.io/"
_ADDED = {  # capabilities that "baseline" lets containers add
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP",
    "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
}  # fmt: skip
_VOLUMES = {
    "name", "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
_TEMPLATES = ("jobs.batch", "deployments.apps", "replicasets.apps")


def check(storage: Storage, resource: Resource, object: Object) -> list[str]:
    """What the server warns of: pods that would not be admitted, or that only "warn" is against.

    Raises:
        StatusError: 403 for a pod that the namespace does not admit.
    """
    if resource is not resources.PODS and resource.qualified not in _TEMPLATES:
        return []
    namespace = storage.get(resources.NAMESPACES, "", object["metadata"]["namespace"]) or {"metadata": {}}
    labels = namespace["metadata"].get("labels") or {}
    if resource is resources.PODS:
        if why := _against(labels, "enforce", object["spec"]):
            raise forbidden(resource, object["metadata"]["name"], f"violates PodSecurity {why}")
        spec = object["spec"]
    else:
        spec = object["spec"]["template"]["spec"]
    why = _against(labels, "warn", spec)
    return [f"would violate PodSecurity {why}"] if why else []


def _against(labels: dict[str, str], mode: str, spec: Object) -> str:
    """The level of a mode, and how a pod violates it; "" if it does not."""
    if mode == "warn" and _LABEL + mode not in labels:
        mode = "enforce"  # of what makes pods, too, whose pods would be refused
    level = labels.get(_LABEL + mode, "privileged")
    found = [*_baseline(spec, level), *(_restricted(spec) if level == "restricted" else ())]
    version = labels.get(f"{_LABEL}{mode}-version", "latest")
    return f'"{level}:{version}": {", ".join(found)}' if found and level != "privileged" else ""


def _named(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _several(word: str, names: list[str]) -> str:
    return f"{word}{'s' if len(names) > 1 else ''} {_named(names)}"


def _containers(spec: Object) -> list[tuple[str, Object, Object]]:
    """Each container with its own security context."""
    every = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    return [(one["name"], one, one.get("securityContext") or {}) for one in every]


def _baseline(spec: Object, level: str) -> Iterator[str]:
    containers = _containers(spec)
    if level == "baseline":
        added = {name: set((own.get("capabilities") or {}).get("add") or ()) - _ADDED for name, _, own in containers}
        if bad := [name for name, more in added.items() if more]:
            listed = _named(sorted(set().union(*added.values())))
            words = f"must not include {listed} in securityContext.capabilities.add"
            yield f"non-default capabilities ({_several('container', bad)} {words})"
    if hosts := [f"{name}=true" for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]:
        yield f"host namespaces ({', '.join(hosts)})"
    paths = [volume["name"] for volume in spec.get("volumes") or [] if volume.get("hostPath") is not None]
    if paths and level == "baseline":
        yield f"hostPath volumes ({_several('volume', paths)})"
    ports = {name: [str(port["hostPort"]) for port in one.get("ports") or [] if port.get("hostPort")]
             for name, one, _ in containers}  # fmt: skip
    if bad := [name for name, used in ports.items() if used]:
        used = sorted({port for each in ports.values() for port in each}, key=int)
        word = "hostPorts" if len(used) > 1 else "hostPort"
        yield f"hostPort ({_several('container', bad)} {'uses' if len(bad) == 1 else 'use'} {word} {', '.join(used)})"
    if bad := [name for name, _, own in containers if own.get("privileged")]:
        yield f"privileged ({_several('container', bad)} must not set securityContext.privileged=true)"


def _restricted(spec: Object) -> Iterator[str]:
    containers, pod = _containers(spec), spec.get("securityContext") or {}
    if bad := [name for name, _, own in containers if own.get("allowPrivilegeEscalation") is not False]:
        words = "must set securityContext.allowPrivilegeEscalation=false"
        yield f"allowPrivilegeEscalation != false ({_several('container', bad)} {words})"
    capabilities = {name: own.get("capabilities") or {} for name, _, own in containers}
    found = []
    if bad := [name for name, of in capabilities.items() if "ALL" not in (of.get("drop") or ())]:
        found.append(f'{_several("container", bad)} must set securityContext.capabilities.drop=["ALL"]')
    added = {name: set(of.get("add") or ()) - {"NET_BIND_SERVICE"} for name, of in capabilities.items()}
    if bad := [name for name, more in added.items() if more]:
        listed = _named(sorted(set().union(*added.values())))
        found.append(f"{_several('container', bad)} must not include {listed} in securityContext.capabilities.add")
    if found:
        yield f"unrestricted capabilities ({'; '.join(found)})"
    kinds = {volume["name"]: next(iter({*volume} - _VOLUMES), "") for volume in spec.get("volumes") or []}
    if bad := [name for name, kind in kinds.items() if kind]:
        uses = "uses restricted volume type" if len(bad) == 1 else "use restricted volume types"
        listed = _named(sorted({kinds[name] for name in bad}))
        yield f"restricted volume types ({_several('volume', bad)} {uses} {listed})"
    false = [name for name, _, own in containers if own.get("runAsNonRoot") is False]
    unset = [name for name, _, own in containers if own.get("runAsNonRoot") is None and not pod.get("runAsNonRoot")]
    if false or (unset and pod.get("runAsNonRoot") is False):
        who = [
            *(["pod"] if pod.get("runAsNonRoot") is False else []),
            *([_several("container", false)] if false else []),
        ]
        yield f"runAsNonRoot != true ({' and '.join(who)} must not set securityContext.runAsNonRoot=false)"
    elif unset:
        yield f"runAsNonRoot != true (pod or {_several('container', unset)} must set securityContext.runAsNonRoot=true)"
    root = [name for name, _, own in containers if own.get("runAsUser") == 0]
    who = [*(["pod"] if pod.get("runAsUser") == 0 else []), *([_several("container", root)] if root else [])]
    if who:
        yield f"runAsUser=0 ({' and '.join(who)} must not set runAsUser=0)"
    bad = [name for name, _, own in containers if not _is_confined({**pod, **own})]
    if bad:
        words = 'must set securityContext.seccompProfile.type to "RuntimeDefault" or "Localhost"'
        yield f"seccompProfile (pod or {_several('container', bad)} {words})"


def _is_confined(security: Object) -> bool:
    return (security.get("seccompProfile") or {}).get("type") in ("RuntimeDefault", "Localhost")
