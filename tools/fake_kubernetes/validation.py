"""What the server refuses although the schema allows it: names, numbers, references, and what cannot be changed."""

from __future__ import annotations

import base64
import binascii
import json
import re
from typing import TYPE_CHECKING, Any

from . import quantity
from .errors import Object, StatusError, bad_request, invalid
from .jobstate import numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .resources import Resource

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_KEY = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_CONFIG_KEY = re.compile(r"[-._a-zA-Z0-9]+")
_ENV = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_MAX = 1048576

Cause = tuple[str, str, str]

_SUBDOMAIN_WORDS = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_LABEL_WORDS = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with "
    "an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
)
_LABEL_1035_WORDS = (
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, "
    "and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is "
    "'[a-z]([-a-z0-9]*[a-z0-9])?')"
)
_VALUE_WORDS = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    "'(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)


def check(resource: Resource, object: Object) -> None:
    """Refuse an object that cannot be stored.

    Raises:
        StatusError: 422 with all causes.
    """
    causes = [*_metadata(resource, object), *_BY_KIND.get(resource.qualified, lambda _: iter(()))(object)]
    if causes:
        raise invalid(resource, object["metadata"].get("name", ""), causes)


def check_change(resource: Resource, old: Object, new: Object, minor: int) -> None:
    """Refuse to change what is fixed."""
    fixed: list[Cause] = []
    if resource.qualified == "jobs.batch":
        fixed = list(_fixed_job(old, new, minor))
    elif resource.qualified in ("configmaps", "secrets") and old.get("immutable"):
        fields = [name for name in ("data", "binaryData") if old.get(name) != new.get(name)]
        fixed = [
            (name, "FieldValueForbidden", "Forbidden: field is immutable when `immutable` is set") for name in fields
        ]
    elif resource.qualified == "pods" and _without_images(old["spec"]) != _without_images(new["spec"]):
        words = (
            "Forbidden: pod updates may not change fields other than `spec.containers[*].image`,"
            "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing "
            "tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
        )
        fixed = [("spec", "FieldValueForbidden", words)]
    elif resource.qualified == "services" and old["spec"].get("clusterIP") != new["spec"].get("clusterIP"):
        value = _shown(new["spec"].get("clusterIP"))
        fixed = [("spec.clusterIPs[0]", "FieldValueInvalid", f"Invalid value: [{value}]: may not change once set")]
    if fixed:
        raise invalid(resource, new["metadata"]["name"], fixed)


def _fixed_job(old: Object, new: Object, minor: int) -> Iterator[Cause]:
    before, after = old["spec"], new["spec"]
    words = "Invalid value: {}: field is immutable"
    for name in (
        "completions", "selector", "completionMode", "template", "podFailurePolicy", "podReplacementPolicy", "successPolicy",
    ):  # fmt: skip
        if before.get(name) == after.get(name):
            continue
        if name == "completions" and minor >= 27 and after.get("completionMode") == "Indexed":
            if after.get("completions") == after.get("parallelism"):
                continue
            yield (f"spec.{name}", "FieldValueInvalid",
                   f"Invalid value: {_shown(after.get(name))}: can only be modified in tandem with parallelism")  # fmt: skip
            continue
        pending = before.get("suspend") and not old.get("status", {}).get("startTime")
        if name == "template" and pending and _scheduling(before["template"]) == _scheduling(after["template"]):
            continue  # a suspended job that has not started: a queue may choose its nodes
        yield f"spec.{name}", "FieldValueInvalid", words.format(_shown(after.get(name)))


def _scheduling(template: Object) -> Object:
    spec = {
        name: value
        for name, value in template["spec"].items()
        if name not in ("nodeSelector", "affinity", "tolerations")
    }
    return {"spec": spec}


def _without_images(spec: Object) -> Object:
    result = {
        name: value for name, value in spec.items() if name not in ("activeDeadlineSeconds", "tolerations", "nodeName")
    }
    for name in ("containers", "initContainers"):
        result[name] = [{**container, "image": ""} for container in spec.get(name) or []]
    return result


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else "null" if value is None else str(value)


def _metadata(resource: Resource, object: Object) -> Iterator[Cause]:
    metadata = object["metadata"]
    name = metadata.get("name", "")
    form, words = _SUBDOMAIN, _SUBDOMAIN_WORDS
    if resource.qualified in ("services",):
        form, words = _LABEL_1035, _LABEL_1035_WORDS
    elif resource.qualified in ("namespaces",):
        form, words = _LABEL, _LABEL_WORDS
    if resource.group == "rbac.authorization.k8s.io":
        form = re.compile(r"[^/%]+")
    limit = 63 if form in (_LABEL, _LABEL_1035) else 253
    if not form.fullmatch(name):
        yield "metadata.name", "FieldValueInvalid", f'Invalid value: "{name}": {words}'
    if len(name) > limit:
        yield "metadata.name", "FieldValueInvalid", f'Invalid value: "{name}": must be no more than {limit} characters'
    yield from _labels(metadata.get("labels"), "metadata.labels")
    for key in metadata.get("annotations") or {}:
        yield from _qualified(key.lower(), "metadata.annotations")
    if sum(len(k) + len(str(v)) for k, v in (metadata.get("annotations") or {}).items()) > 262144:
        yield "metadata.annotations", "FieldValueTooLong", "Too long: must have at most 262144 bytes"
    for index, owner in enumerate(metadata.get("ownerReferences") or []):
        for field in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(field):
                path = f"metadata.ownerReferences[{index}].{field}"
                yield path, "FieldValueInvalid", f'Invalid value: "": {field} must not be empty'


def _labels(labels: Object | None, path: str) -> Iterator[Cause]:
    for key, value in (labels or {}).items():
        yield from _qualified(key, path)
        if len(value) > 63:
            yield path, "FieldValueInvalid", f'Invalid value: "{value}": must be no more than 63 characters'
        elif not _VALUE.fullmatch(value):
            yield path, "FieldValueInvalid", f'Invalid value: "{value}": {_VALUE_WORDS}'


def _qualified(key: str, path: str) -> Iterator[Cause]:
    prefix, slash, name = key.rpartition("/")
    if not _KEY.fullmatch(name) or len(name) > 63 or (slash and not _SUBDOMAIN.fullmatch(prefix)):
        words = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character"
        yield path, "FieldValueInvalid", f'Invalid value: "{key}": {words}'


def _job(object: Object) -> Iterator[Cause]:
    spec = object["spec"]
    for name in ("parallelism", "completions", "backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished"):
        value = spec.get(name)
        if value is not None and value < 0:
            words = f"Invalid value: {value}: must be greater than or equal to 0"
            yield f"spec.{name}", "FieldValueInvalid", words
    mode = spec.get("completionMode", "NonIndexed")
    if mode not in ("Indexed", "NonIndexed"):
        words = f'Unsupported value: "{mode}": supported values: "NonIndexed", "Indexed"'
        yield "spec.completionMode", "FieldValueNotSupported", words
    if mode == "Indexed" and spec.get("completions") is None:
        words = "Required value: when completion mode is Indexed"
        yield "spec.completions", "FieldValueRequired", words
    if mode == "Indexed" and spec.get("completions"):
        name = f"{object['metadata'].get('name', '')}-{spec['completions'] - 1}"
        if len(name) > 63:
            words = f'Invalid value: "{object["metadata"]["name"]}": will not able to create pod with invalid DNS label: {name}'
            yield "metadata.name", "FieldValueInvalid", words
    if spec.get("podFailurePolicy") is not None:
        yield from _failure_policy(spec)
    if spec.get("successPolicy") is not None:
        yield from _success_policy(spec, mode)
    template = spec["template"]
    policy = template["spec"].get("restartPolicy")
    if policy not in ("Never", "OnFailure"):
        words = 'Required value: valid values: "OnFailure", "Never"' if policy in (None, "Always") else (
            f'Unsupported value: "{policy}": supported values: "OnFailure", "Never"')  # fmt: skip
        yield "spec.template.spec.restartPolicy", "FieldValueRequired", words
    yield from _template(template, "spec.template")


def _failure_policy(spec: Object) -> Iterator[Cause]:
    """Source: pkg/apis/batch/validation/validation.go."""
    here, template = "spec.podFailurePolicy", spec["template"]["spec"]
    if (policy := template.get("restartPolicy")) != "Never":
        words = f'Invalid value: "{policy}": only "Never" is supported when podFailurePolicy is specified'
        yield "spec.template.spec.restartPolicy", "FieldValueInvalid", words
    if (replaced := spec.get("podReplacementPolicy", "Failed")) != "Failed":
        words = f'Unsupported value: "{replaced}": supported values: "Failed"'
        yield "spec.podReplacementPolicy", "FieldValueNotSupported", words
    names = {one["name"] for kind in ("containers", "initContainers") for one in template.get(kind) or ()}
    for number, rule in enumerate(spec["podFailurePolicy"]["rules"]):
        place, codes = f"{here}.rules[{number}]", rule.get("onExitCodes")
        if (codes is None) == (rule.get("onPodConditions") is None):
            words = "specifying one of OnExitCodes and OnPodConditions is required" if codes is None else (
                "specifying both OnExitCodes and OnPodConditions is not supported")  # fmt: skip
            yield place, "FieldValueInvalid", f"Invalid value: {words}"
        if codes is None:
            continue
        place, values = f"{place}.onExitCodes", codes.get("values") or []
        if codes.get("containerName") not in (None, *names):
            words = f'Invalid value: "{codes["containerName"]}": must be one of the container or initContainer names in the pod template'
            yield f"{place}.containerName", "FieldValueInvalid", words
        if not 0 < len(values) <= 255:
            words = "at least one value is required" if not values else "must have at most 255 items"
            yield f"{place}.values", "FieldValueInvalid", f"Invalid value: {values}: {words}"
        if values != sorted(set(values)):
            yield f"{place}.values", "FieldValueInvalid", f"Invalid value: {values}: must be ordered"
        if codes["operator"] == "In" and 0 in values:
            words = "Invalid value: 0: must not be 0 for the In operator"
            yield f"{place}.values[{values.index(0)}]", "FieldValueInvalid", words


def _success_policy(spec: Object, mode: str) -> Iterator[Cause]:
    """Source: pkg/apis/batch/validation/validation.go."""
    here, policy = "spec.successPolicy", spec["successPolicy"]
    if mode != "Indexed":
        yield here, "FieldValueInvalid", f"Invalid value: {json.dumps(policy)}: requires indexed completion mode"
        return
    if not policy.get("rules"):
        words = "Required value: at least one rules must be specified when the successPolicy is specified"
        yield f"{here}.rules", "FieldValueRequired", words
    for number, rule in enumerate(policy.get("rules") or []):
        count, indexes = rule.get("succeededCount"), rule.get("succeededIndexes")
        if count is None and indexes is None:
            words = "Required value: at least one of succeededCount or succeededIndexes must be specified"
            yield f"{here}.rules[{number}]", "FieldValueRequired", words
        most, of = spec.get("completions") or 0, "the number of specified completions"
        if indexes is not None:
            try:
                found = numbers(indexes)
                why = f'too large index: "{indexes}"' if max(found) >= most else ""
                most, of = len(found), "the number of indexes in the specified succeededIndexes field"
            except ValueError:
                why = f'cannot convert string to integer for index: "{indexes}"'
            if why:
                words = f'Invalid value: "{indexes}": error parsing succeededIndexes: {why}'
                yield f"{here}.rules[{number}].succeededIndexes", "FieldValueInvalid", words
        if count is not None and count > most:
            words = f"Invalid value: {count}: must be less than or equal to {most} ({of})"
            yield f"{here}.rules[{number}].succeededCount", "FieldValueInvalid", words


def _template(template: Object, path: str) -> Iterator[Cause]:
    yield from _labels((template.get("metadata") or {}).get("labels"), f"{path}.labels")
    yield from _pod_spec(template["spec"], f"{path}.spec")


def _pod(object: Object) -> Iterator[Cause]:
    yield from _pod_spec(object["spec"], "spec")


def _pod_spec(spec: Object, path: str) -> Iterator[Cause]:
    volumes: set[str] = set()
    for index, volume in enumerate(spec.get("volumes") or []):
        here = f"{path}.volumes[{index}]"
        yield from _label(volume["name"], f"{here}.name")
        if volume["name"] in volumes:
            yield f"{here}.name", "FieldValueDuplicate", f'Duplicate value: "{volume["name"]}"'
        volumes.add(volume["name"])
        kinds = [name for name, value in volume.items() if name != "name" and value is not None]
        if len(kinds) > 1:
            words = "Forbidden: may not specify more than 1 volume type"
            yield f"{here}.{kinds[1]}", "FieldValueForbidden", words
        config = volume.get("configMap")
        if config is not None and not config.get("name"):
            yield f"{here}.configMap.name", "FieldValueRequired", "Required value"
    if not spec.get("containers"):
        yield f"{path}.containers", "FieldValueRequired", "Required value"
    names: set[str] = set()
    for kind in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(kind) or []):
            here = f"{path}.{kind}[{index}]"
            if container["name"] in names:
                yield f"{here}.name", "FieldValueDuplicate", f'Duplicate value: "{container["name"]}"'
            names.add(container["name"])
            yield from _container(container, here, volumes)
    for field in ("hostname", "subdomain"):
        if spec.get(field):
            yield from _label(spec[field], f"{path}.{field}")
    yield from _labels(spec.get("nodeSelector"), f"{path}.nodeSelector")
    grace = spec.get("terminationGracePeriodSeconds")
    if grace is not None and grace < 0:
        words = f"Invalid value: {grace}: must be greater than or equal to 0"
        yield f"{path}.terminationGracePeriodSeconds", "FieldValueInvalid", words
    yield from _security(spec.get("securityContext") or {}, f"{path}.securityContext")
    for index, rule in enumerate(spec.get("topologySpreadConstraints") or []):
        here = f"{path}.topologySpreadConstraints[{index}]"
        if rule["maxSkew"] <= 0:
            words = f"Invalid value: {rule['maxSkew']}: must be greater than zero"
            yield f"{here}.maxSkew", "FieldValueInvalid", words
        if not rule["topologyKey"]:
            yield f"{here}.topologyKey", "FieldValueRequired", "Required value: can not be empty"
        if (when := rule["whenUnsatisfiable"]) not in ("DoNotSchedule", "ScheduleAnyway"):
            words = f'Unsupported value: "{when}": supported values: "DoNotSchedule", "ScheduleAnyway"'
            yield f"{here}.whenUnsatisfiable", "FieldValueNotSupported", words
    for index, toleration in enumerate(spec.get("tolerations") or []):
        operator = toleration.get("operator", "Equal")
        here = f"{path}.tolerations[{index}].operator"
        if operator not in ("Equal", "Exists"):
            words = f'Unsupported value: "{operator}": supported values: "Equal", "Exists"'
            yield here, "FieldValueNotSupported", words
        elif operator == "Exists" and toleration.get("value"):
            words = "Invalid value: core.Toleration: value must be empty when `operator` is 'Exists'"
            yield here, "FieldValueInvalid", words


def _container(container: Object, path: str, volumes: set[str]) -> Iterator[Cause]:
    yield from _label(container["name"], f"{path}.name")
    if not container.get("image"):
        yield f"{path}.image", "FieldValueRequired", "Required value"
    elif container["image"] != container["image"].strip():
        words = f'Invalid value: "{container["image"]}": must not have leading or trailing whitespace'
        yield f"{path}.image", "FieldValueInvalid", words
    mounted: set[str] = set()
    for index, mount in enumerate(container.get("volumeMounts") or []):
        here = f"{path}.volumeMounts[{index}]"
        if mount["name"] not in volumes:
            yield f"{here}.name", "FieldValueNotFound", f'Not found: "{mount["name"]}"'
        if mount["mountPath"] in mounted:
            words = f'Invalid value: "{mount["mountPath"]}": must be unique'
            yield f"{here}.mountPath", "FieldValueInvalid", words
        mounted.add(mount["mountPath"])
    for index, variable in enumerate(container.get("env") or []):
        here = f"{path}.env[{index}]"
        if not _ENV.fullmatch(variable["name"]):
            words = (
                "a valid environment variable name must consist of alphabetic characters, digits, '_', '-', or '.', and "
                "must not start with a digit (e.g. 'my.env-name',  or 'MY_ENV.NAME',  or 'MyEnvName1', regex used for "
                "validation is '[-._a-zA-Z][-._a-zA-Z0-9]*')"
            )
            yield f"{here}.name", "FieldValueInvalid", f'Invalid value: "{variable["name"]}": {words}'
        if variable.get("value") and variable.get("valueFrom"):
            words = 'Invalid value: "": may not be specified when `value` is not empty'
            yield f"{here}.valueFrom", "FieldValueInvalid", words
    yield from _security(container.get("securityContext") or {}, f"{path}.securityContext")
    yield from _resources(container.get("resources") or {}, f"{path}.resources")
    for index, port in enumerate(container.get("ports") or []):
        if not 0 < port["containerPort"] < 65536:
            words = f"Invalid value: {port['containerPort']}: must be between 1 and 65535, inclusive"
            yield f"{path}.ports[{index}].containerPort", "FieldValueInvalid", words


def _security(security: Object, path: str) -> Iterator[Cause]:
    profile = security.get("seccompProfile")
    if profile is not None:
        kinds = ("Localhost", "RuntimeDefault", "Unconfined")
        if (kind := profile.get("type")) not in kinds:
            words = f'Unsupported value: "{kind}": supported values: {", ".join(map(json.dumps, kinds))}'
            yield f"{path}.seccompProfile.type", "FieldValueNotSupported", words
        elif kind == "Localhost" and not profile.get("localhostProfile"):
            words = "Required value: must be set when seccomp type is Localhost"
            yield f"{path}.seccompProfile.localhostProfile", "FieldValueRequired", words
    added = (security.get("capabilities") or {}).get("add") or ()
    if security.get("allowPrivilegeEscalation") is False and (security.get("privileged") or "SYS_ADMIN" in added):
        what = "`privileged` to true" if security.get("privileged") else "`capabilities.Add` CAP_SYS_ADMIN"
        words = f"cannot set `allowPrivilegeEscalation` to false and {what}"
        yield path, "FieldValueInvalid", f"Invalid value: core.SecurityContext: {words}"


def _resources(resources: Object, path: str) -> Iterator[Cause]:
    limits, asked = resources.get("limits") or {}, resources.get("requests") or {}
    for kind, listed in (("limits", limits), ("requests", asked)):
        for name, value in listed.items():
            if quantity.parse(value) < 0:
                words = f'Invalid value: "{value}": must be greater than or equal to 0'
                yield f"{path}.{kind}[{name}]", "FieldValueInvalid", words
            if (
                "/" not in name
                and name not in ("cpu", "memory", "ephemeral-storage")
                and not name.startswith("hugepages-")
            ):
                words = f'Invalid value: "{name}": must be a standard resource type or fully qualified'
                yield f"{path}.{kind}[{name}]", "FieldValueInvalid", words
    for name, value in asked.items():
        extended = "/" in name
        if name not in limits:
            if extended:
                words = "Required value: Limit must be set for non overcommitable resources"
                yield f"{path}.limits", "FieldValueRequired", words
            continue
        limit = quantity.parse(limits[name])
        if quantity.parse(value) > limit or (extended and quantity.parse(value) != limit):
            relation = "equal to" if extended else "less than or equal to"
            words = f'Invalid value: "{value}": must be {relation} {name} limit of {limits[name]}'
            yield f"{path}.requests", "FieldValueInvalid", words


def _label(name: str, path: str) -> Iterator[Cause]:
    if not _LABEL.fullmatch(name):
        yield path, "FieldValueInvalid", f'Invalid value: "{name}": {_LABEL_WORDS}'
    elif len(name) > 63:
        yield path, "FieldValueInvalid", f'Invalid value: "{name}": must be no more than 63 characters'


def _config(object: Object) -> Iterator[Cause]:
    total = 0
    for field in ("data", "binaryData"):
        for key, value in (object.get(field) or {}).items():
            if not _CONFIG_KEY.fullmatch(key):
                words = (
                    "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or "
                    "'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')"
                )
                yield f"{field}[{key}]", "FieldValueInvalid", f'Invalid value: "{key}": {words}'
            total += len(value.encode()) if field == "data" else len(value) * 3 // 4
    if total > _MAX:
        yield "", "FieldValueTooLong", f"Too long: must have at most {_MAX} bytes"


def _secret(object: Object) -> Iterator[Cause]:
    total = sum(len(value) * 3 // 4 for value in (object.get("data") or {}).values())
    for key in object.get("data") or {}:
        if not _CONFIG_KEY.fullmatch(key):
            yield f"data[{key}]", "FieldValueInvalid", f'Invalid value: "{key}": a valid config key must consist of …'
    if total > _MAX:
        yield "data", "FieldValueTooLong", f"Too long: must have at most {_MAX} bytes"


def check_base64(resource: Resource, object: Object) -> None:
    """Refuse bytes that are no base64.

    Raises:
        StatusError: 400.
    """
    for field in ("binaryData",) if resource.kind == "ConfigMap" else ("data",) if resource.kind == "Secret" else ():
        for value in (object.get(field) or {}).values():
            try:
                base64.b64decode(value, validate=True)
            except binascii.Error:
                raise _illegal(resource) from None


def _illegal(resource: Resource) -> StatusError:
    text = f'{resource.kind} in version "v1" cannot be handled as a {resource.kind}'
    return bad_request(f"{text}: illegal base64 data at input byte 0")


def _service(object: Object) -> Iterator[Cause]:
    spec = object.get("spec") or {}
    if not spec.get("ports") and spec.get("clusterIP") != "None" and spec.get("type") != "ExternalName":
        yield "spec.ports", "FieldValueRequired", "Required value"
    ports = spec.get("ports") or []
    for index, port in enumerate(ports):
        if len(ports) > 1 and not port.get("name"):
            yield f"spec.ports[{index}].name", "FieldValueRequired", "Required value"
        if not 0 < port["port"] < 65536:
            words = f"Invalid value: {port['port']}: must be between 1 and 65535, inclusive"
            yield f"spec.ports[{index}].port", "FieldValueInvalid", words


def _deployment(object: Object) -> Iterator[Cause]:
    yield from _template(object["spec"]["template"], "spec.template")
    wanted = (object["spec"].get("selector") or {}).get("matchLabels") or {}
    labels = (object["spec"]["template"].get("metadata") or {}).get("labels") or {}
    if not wanted or any(labels.get(name) != value for name, value in wanted.items()):
        words = f"Invalid value: {labels}: `selector` does not match template `labels`"
        yield "spec.template.metadata.labels", "FieldValueInvalid", words


_BY_KIND = {
    "jobs.batch": _job, "pods": _pod, "configmaps": _config, "secrets": _secret, "services": _service,
    "deployments.apps": _deployment, "replicasets.apps": _deployment,
}  # fmt: skip
