"""What a server says of itself: its version, its groups and kinds, and the schemas of those."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from . import schema

if TYPE_CHECKING:
    from .api import Api

_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_OF_SUB = {"log": ["get"], "exec": ["create", "get"], "portforward": ["create", "get"], "attach": ["create", "get"]}
_KIND_OF_SUB = {"eviction": ("Eviction", "policy", "v1"), "scale": ("Scale", "autoscaling", "v1")}
_PATCH = (  # of the paths that are described: kubectl looks whether the server validates
    {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}},
    {"name": "dryRun", "in": "query", "schema": {"type": "string"}},
)


def answer(api: Api, path: str) -> Any:
    """What is under a path, None if it is not about the server itself."""
    path = path.rstrip("/")
    if path == "/version":
        version = {"major": "1", "minor": str(api.minor), "gitVersion": f"v1.{api.minor}.0"}
        return {**version, "gitCommit": "0", "gitTreeState": "clean", "buildDate": "2022-05-03T13:38:19Z",
                "goVersion": "go1.18", "compiler": "gc", "platform": "linux/amd64"}  # fmt: skip
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if path == "/apis":
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": list(_groups(api).values())}
    parts = path.split("/")[1:]
    if parts[0] == "apis" and len(parts) == 2:
        found = _groups(api).get(parts[1])
        return found and {"kind": "APIGroup", "apiVersion": "v1", **found}
    if path == "/api/v1":
        return _listed(api, "v1")
    if parts[0] == "apis" and len(parts) == 3:
        return _listed(api, f"{parts[1]}/{parts[2]}")
    if path == "/openapi/v3":
        versions = {resource.api_version for resource in api.served()}
        paths = {
            _path(version)[1:]: {"serverRelativeURL": f"/openapi/v3{_path(version)}"} for version in sorted(versions)
        }
        return {"paths": paths}
    if path.startswith("/openapi/v3/"):
        return _described(api, "/".join(parts[3:]))
    return None


def _path(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _groups(api: Api) -> dict[str, Any]:
    groups: dict[str, Any] = {}
    for resource in api.served():
        if resource.group:
            group = groups.setdefault(resource.group, {"name": resource.group, "versions": []})
            entry = {"groupVersion": resource.api_version, "version": resource.version}
            if entry not in group["versions"]:
                group["versions"].append(entry)
    for group in groups.values():
        group["versions"].sort(
            key=lambda entry: ("alpha" in entry["version"], "beta" in entry["version"], entry["version"])
        )
        group["preferredVersion"] = group["versions"][0]
    return groups


def _listed(api: Api, version: str) -> Any:
    found = []
    for resource in api.served():
        if resource.api_version != version:
            continue
        entry: dict[str, Any] = {
            "name": resource.plural, "singularName": "" if api.minor < 27 else resource.singular,
            "namespaced": resource.namespaced, "kind": resource.kind,
            "verbs": ["create"] if resource.virtual else _VERBS,
        }  # fmt: skip
        if resource.short:
            entry["shortNames"] = list(resource.short)
        if resource.categories:
            entry["categories"] = list(resource.categories)
        found.append(entry)
        for sub in resource.subresources:
            kind, group, of_version = _KIND_OF_SUB.get(sub, (resource.kind, "", ""))
            below = {"name": f"{resource.plural}/{sub}", "singularName": "", "namespaced": resource.namespaced}
            below.update(kind=kind, verbs=_OF_SUB.get(sub, ["get", "patch", "update"]))
            if group:
                below.update(group=group, version=of_version, verbs=["create"] if sub == "eviction" else below["verbs"])
            found.append(below)
    if not found:
        return None
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": found}


def _described(api: Api, version: str) -> Any:
    """The schemas of a version, as far as clients ask: all that its kinds need."""
    kinds = [resource for resource in api.served() if resource.api_version == version and not resource.virtual]
    if not kinds:
        return None
    paths: dict[str, Any] = {}
    needed: dict[str, Any] = {}
    names = schema.by_kind(api.minor)
    for resource in kinds:
        kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
        place = f"{_path(version)}/{'namespaces/{namespace}/' if resource.namespaced else ''}{resource.plural}"
        operation = {"parameters": list(_PATCH), "x-kubernetes-group-version-kind": kind, "responses": {}}
        paths[f"{place}/{{name}}"] = {"patch": {**operation, "x-kubernetes-action": "patch"}}
        paths[place] = {"post": {**operation, "x-kubernetes-action": "post"}}
        name = names.get((resource.group, resource.version, resource.kind))
        own = f"{resource.api_version}/{resource.kind}"
        if name:
            _collect(api, name, needed)
        elif own in api.custom_schemas:
            described = _open(api, api.custom_schemas[own], needed)
            needed[own.replace("/", ".")] = {**described, "x-kubernetes-group-version-kind": [kind]}
    info = {"title": "Kubernetes", "version": f"v1.{api.minor}.0"}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": needed}}


def _collect(api: Api, name: str, needed: dict[str, Any]) -> None:
    """A definition and all below it."""
    if name in needed:
        return
    needed[name] = {}
    found = api.custom_schemas.get(name) or schema.definitions(api.minor)[name]
    needed[name] = _open(api, found, needed)


def _open(api: Api, value: Any, needed: dict[str, Any]) -> Any:
    """A part of a schema in the words of OpenAPI 3.0: types are single, references are to components."""
    if isinstance(value, list):
        return [_open(api, item, needed) for item in value]
    if not isinstance(value, dict):
        return value
    result = {key: _open(api, item, needed) for key, item in value.items() if key not in ("$ref", "enum")}
    if isinstance(value.get("type"), list):
        result["type"] = next(kind for kind in value["type"] if kind != "null")
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        _collect(api, name, needed)
        result["allOf"] = [{"$ref": f"#/components/schemas/{name}"}]
    return copy.copy(result)
