"""The schema of a kind of object, as the API server describes it (OpenAPI 3): which fields the kind has there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_OPEN = "x-kubernetes-preserve-unknown-fields"


def fields_of(found: Any) -> set[str]:
    """The names of all fields in a manifest, or in a part of one."""
    if isinstance(found, list):
        return {name for one in found for name in fields_of(one)}
    if not isinstance(found, dict):
        return set()
    return {*found, *(name for one in found.values() for name in fields_of(one))}


class Schema:
    """The fields of a kind."""

    def __init__(self, root: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        """Take the schema of a kind, and those of the same document that it may refer to, by name."""
        self._root, self._others = root, others

    @classmethod
    def of(cls, document: Mapping[str, Any], api_version: str, kind: str) -> Schema | None:
        """The schema of a kind in an OpenAPI document; None if it is not there."""
        schemas = (document.get("components") or {}).get("schemas") or {}
        group, _, version = api_version.rpartition("/")
        wanted = {"group": group, "version": version, "kind": kind}
        for found in schemas.values():
            if wanted in (found.get("x-kubernetes-group-version-kind") or ()):
                return cls(found, schemas)
        return None

    def has(self, *path: str) -> bool:
        """Whether the kind has a field: `has("spec", "suspend")`. Lists on the way take no part of the path."""
        at: Mapping[str, Any] | None = self._root
        for name in path:
            at = self._below(at, name)
            if at is None:
                return False
        return True

    def without(self, value: Any, names: Collection[str]) -> Any:
        """An object without those of its fields that have one of these names and that the kind does not have."""
        return self._without(value, self._root, names)

    def _without(self, value: Any, at: Mapping[str, Any], names: Collection[str]) -> Any:
        if isinstance(value, list):
            return [self._without(one, at, names) for one in value]
        if not isinstance(value, dict):
            return value
        found = {}
        for name, one in value.items():
            below = self._below(at, name)
            if below is not None:
                found[name] = self._without(one, below, names)
            elif name not in names:
                found[name] = one
        return found

    def _below(self, at: Mapping[str, Any] | None, name: str) -> Mapping[str, Any] | None:
        """The schema of a field; None if there is no such field."""
        at = self._resolved(at or {})
        while "items" in at:
            at = self._resolved(at["items"])
        properties, others = at.get("properties"), at.get("additionalProperties")
        if properties and name in properties:
            found: Mapping[str, Any] = properties[name]
            return found
        if isinstance(others, dict):
            return others
        return None if properties and not at.get(_OPEN) else {}

    def _resolved(self, at: Mapping[str, Any]) -> Mapping[str, Any]:
        """The schema that one refers to, or itself."""
        while True:
            reference = at.get("$ref") or next((it["$ref"] for it in at.get("allOf") or () if "$ref" in it), None)
            if reference is None:
                return at
            at = self._others.get(reference.rpartition("/")[2]) or {}
