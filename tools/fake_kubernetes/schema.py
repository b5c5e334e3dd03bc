"""Objects against the schemas of Kubernetes, as kubernetes-validate brings them: unknown fields, types, what is required."""

from __future__ import annotations

import copy
import functools
import importlib.resources
import json
import re
from typing import TYPE_CHECKING, Any

from .errors import Object, bad_request, invalid

if TYPE_CHECKING:
    from .resources import Resource

_QUANTITY = re.compile(r"^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$")
_QUANTITY_WORDS = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"  # as the server says it

# Fields of batch/v1 and the version that brings them; older servers do not know them.
_SINCE = {
    "podFailurePolicy": 26, "backoffLimitPerIndex": 29, "maxFailedIndexes": 29, "podReplacementPolicy": 29,
    "successPolicy": 31, "managedBy": 31,
}  # fmt: skip


@functools.cache
def definitions(minor: int) -> dict[str, Any]:
    """All definitions of a server's version; 1.24 has those of 1.25, which is the oldest that is there."""
    folder = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema"
    text = (folder / f"v1.{max(25, minor)}.0-local" / "_definitions.json").read_text()
    found: dict[str, Any] = json.loads(text)["$defs"]
    fields = found["io.k8s.api.batch.v1.JobSpec"]["properties"]
    for name, since in _SINCE.items():
        if minor < since:
            fields.pop(name, None)
    return found


@functools.cache
def by_kind(minor: int) -> dict[tuple[str, str, str], str]:
    """The definition of each group, version and kind."""
    return {
        (kind["group"], kind["version"], kind["kind"]): name
        for name, schema in definitions(minor).items()
        for kind in schema.get("x-kubernetes-group-version-kind", ())
    }


class Checker:
    """Checks an object, and takes the fields out of it that nobody knows."""

    def __init__(self, minor: int, custom: dict[str, Any] | None = None) -> None:
        """`custom` are schemas of further kinds, by group/version/kind, which may refer to the definitions."""
        self.definitions = definitions(minor)
        self._kinds = by_kind(minor)
        self._custom = {} if custom is None else custom

    def check(self, resource: Resource, object: Object, strict: bool) -> Object:
        """The object without unknown fields and nulls.

        Raises:
            StatusError: a field of a wrong type (400), an unknown one when strict (400), one that is missing (422).
        """
        self._kind, self._version = resource.kind, resource.api_version
        self._unknown: list[str] = []
        self._missing: list[str] = []
        self._wrong: list[tuple[str, str]] = []
        name = self._kinds.get((resource.group, resource.version, resource.kind))
        schema = self.definitions.get(name or "") or self._custom.get(f"{resource.api_version}/{resource.kind}")
        if schema is None:
            return copy.deepcopy(object)
        self._is_custom = resource.custom
        result: Object = self._walk(object, schema, "")
        if self._unknown and strict:
            words = ", ".join(f'unknown field "{path}"' for path in self._unknown)
            if resource.custom:
                words = f"{resource.kind} in version {resource.version!r}: {words}".replace("'", '"')
            raise bad_request(f"strict decoding error: {words}")
        causes = [(path, "FieldValueTypeInvalid", words) for path, words in self._wrong]
        causes += [(path, "FieldValueRequired", "Required value") for path in self._missing]
        if causes:
            raise invalid(resource, object.get("metadata", {}).get("name", ""), causes)
        return result

    def _refuse(self, words: str) -> Exception:
        text = f'{self._kind} in version "{self._version.rpartition("/")[2]}" cannot be handled as a {self._kind}'
        return bad_request(f"{text}: {words}")

    def _walk(self, value: Any, schema: Any, path: str) -> Any:
        reference = schema.get("$ref")
        if reference:
            name = reference.rpartition("/")[2]
            schema = self.definitions.get(name) or self._custom[name]
            if name.endswith("resource.Quantity"):
                fits = isinstance(value, (str, int, float)) and _QUANTITY.match(str(value))
                if not fits and self._is_custom:
                    words = (
                        f'Invalid value: "{value}": {path} in body should match the regular expression of quantities'
                    )
                    self._wrong.append((path, words))
                elif not fits:
                    raise self._refuse(_QUANTITY_WORDS)
                return value if self._is_custom else str(value)
        if schema.get("x-kubernetes-preserve-unknown-fields"):
            return copy.deepcopy(value)
        if schema.get("oneOf"):
            return copy.deepcopy(value)
        kinds = schema.get("type", ())
        kinds = [kinds] if isinstance(kinds, str) else kinds
        kind = next((kind for kind in kinds if kind != "null"), "")
        if value is None:
            return None
        if kind and not _is(value, kind):
            return self._mistyped(value, kind, path, schema)
        if isinstance(value, dict):
            return self._object(value, schema, path)
        if isinstance(value, list):
            items = schema.get("items") or {}
            return [self._walk(item, items, f"{path}[{index}]") for index, item in enumerate(value)]
        if self._is_custom and "enum" in schema and value not in schema["enum"]:
            allowed = ", ".join(f'"{item}"' for item in schema["enum"])
            self._wrong.append((path, f'Unsupported value: "{value}": supported values: {allowed}'))
        return value

    def _mistyped(self, value: Any, kind: str, path: str, schema: Any) -> Any:
        found = "array" if isinstance(value, list) else _name(value)
        if self._is_custom and path:
            words = f'Invalid value: "{found}": {path} in body must be of type {kind}: "{found}"'
            self._wrong.append((path, words))
            return value
        go = {"array": "[]interface {}", "object": "map[string]interface {}"}.get(kind, kind)
        go = "string" if kind == "string" else schema.get("format", "int32") if kind == "integer" else go
        field = re.sub(r"\[\d+\]", "", path)
        shown = {"string": "string", "integer": "number", "number": "number", "boolean": "bool"}.get(found, found)
        raise self._refuse(f"json: cannot unmarshal {shown} into Go struct field {self._kind}.{field} of type {go}")

    def _object(self, value: Object, schema: Any, path: str) -> Object:
        properties = schema.get("properties")
        others = schema.get("additionalProperties")
        if properties is None:
            if not isinstance(others, dict):
                return copy.deepcopy(value)
            return {
                name: self._walk(item, others, _join(path, name)) for name, item in value.items() if item is not None
            }
        result: Object = {}
        for name, item in value.items():
            below = _join(path, name)
            if name not in properties:
                if not path and name in ("apiVersion", "kind", "metadata"):
                    result[name] = item
                else:
                    self._unknown.append(below)
            elif item is not None:
                result[name] = self._walk(item, properties[name], below)
        for name in schema.get("required", ()):
            if result.get(name) is None and path != "status" and not path.startswith("status."):
                self._missing.append(_join(path, name))
        return result


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _name(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return {str: "string", int: "integer", float: "number", dict: "object", list: "array"}[type(value)]


def _is(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        whole = kind == "number" or float(value).is_integer() if isinstance(value, (int, float)) else False
        return isinstance(value, (int, float)) and not isinstance(value, bool) and whole
    return isinstance(value, {"string": str, "boolean": bool, "object": dict, "array": list}[kind])
