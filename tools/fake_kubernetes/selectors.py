"""Label and field selectors."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from .errors import Object, bad_request

if TYPE_CHECKING:
    from collections.abc import Callable

    from .resources import Resource

_SET = re.compile(r"^\s*([^\s!=,()]+)\s+(in|notin)\s+\(([^)]*)\)\s*$")
_EQUAL = re.compile(r"^\s*([^\s!=,()]+)\s*(==|=|!=)\s*([^\s=,()]*)\s*$")
_EXISTS = re.compile(r"^\s*(!?)\s*([^\s!=,()]+)\s*$")


def of_labels(text: str) -> Callable[[dict[str, str]], bool]:
    """What a labelSelector of a request takes."""
    tests = [_label_test(part) for part in re.split(r",(?![^(]*\))", text) if part.strip()]
    return lambda labels: all(test(labels) for test in tests)


def _label_test(part: str) -> Callable[[dict[str, str]], bool]:
    if found := _SET.match(part):
        name, operator, listed = found.groups()
        values = {value.strip() for value in listed.split(",")}
        return lambda labels: (labels.get(name) in values) == (operator == "in")
    if found := _EQUAL.match(part):
        name, operator, value = found.groups()
        return lambda labels: (labels.get(name) == value) == (operator != "!=")
    if found := _EXISTS.match(part):
        negated, name = found.groups()
        return lambda labels: (name in labels) != bool(negated)
    raise bad_request(f'unable to parse requirement: found "{part}", expected: label selector')


def of_object(selector: Object | None) -> Callable[[dict[str, str]], bool]:
    """What a LabelSelector inside an object takes; nothing if it is empty."""
    selector = selector or {}
    if "matchLabels" not in selector and "matchExpressions" not in selector:
        return lambda labels: False

    def matches(labels: dict[str, str]) -> bool:
        if any(labels.get(name) != value for name, value in (selector.get("matchLabels") or {}).items()):
            return False
        return all(expression(rule, labels) for rule in selector.get("matchExpressions") or [])

    return matches


def expression(rule: Object, labels: dict[str, str]) -> bool:
    """Whether labels fulfil one of matchExpressions."""
    name, operator, values = rule["key"], rule["operator"], rule.get("values") or []
    value = labels.get(name)
    return {
        "In": value in values,
        "NotIn": value not in values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
        "Gt": value is not None and values and _number(value) > _number(values[0]),
        "Lt": value is not None and values and _number(value) < _number(values[0]),
    }[operator]  # type: ignore[return-value]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


# The fields that a fieldSelector may name, beside the name and the namespace: pkg/apis/core/v1/conversion.go.
_FIELDS = {
    "pods": ("spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName",
             "spec.hostNetwork", "status.phase", "status.podIP", "status.nominatedNodeName"),
    "nodes": ("spec.unschedulable",), "namespaces": ("status.phase",), "secrets": ("type",),
    "jobs.batch": ("status.successful",),
    "events": ("involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid",
               "involvedObject.apiVersion", "involvedObject.resourceVersion", "involvedObject.fieldPath", "reason",
               "reportingComponent", "source", "type"),
}  # fmt: skip


def of_fields(text: str, resource: Resource) -> Callable[[Object], bool]:
    """What a fieldSelector takes."""
    known = ("metadata.name", "metadata.namespace", *_FIELDS.get(resource.qualified, ()))
    tests: list[tuple[list[str], bool, str]] = []
    for part in filter(None, text.split(",")):
        found = _EQUAL.match(part)
        if not found:
            raise bad_request(f'invalid selector: "{text}"; can\'t understand "{part}"')
        if found[1] not in known:
            raise bad_request(f"field label not supported: {found[1]}")
        tests.append((found[1].split("."), found[2] != "!=", found[3]))
    return lambda object: all((_at(object, path) == value) == wanted for path, wanted, value in tests)


def _at(object: Object, path: list[str]) -> str:
    value: Any = object
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
