"""The patches that clients send."""

from __future__ import annotations

import copy
from typing import Any

from .errors import Object, StatusError, bad_request

# What tells the elements of a list apart, by the list's name, as in the types of Kubernetes.
_KEYS = {
    "containers": ("name",), "initContainers": ("name",), "ephemeralContainers": ("name",), "env": ("name",),
    "volumes": ("name",), "volumeMounts": ("mountPath",), "volumeDevices": ("devicePath",),
    "imagePullSecrets": ("name",), "conditions": ("type",), "hostAliases": ("ip",), "secrets": ("name",),
    "topologySpreadConstraints": ("topologyKey",), "resourceClaims": ("name",),
    "ports": ("containerPort", "port"), "ownerReferences": ("uid",), "addresses": ("type",),
}  # fmt: skip
_PLAIN = {"finalizers"}  # lists of plain values that are merged


def merge(target: Any, patch: Any) -> Any:
    """A JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge(result.get(name), value)
    return result


def strategic(target: Any, patch: Any) -> Any:
    """A strategic merge patch: lists of named things are merged element by element."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    if patch.get("$patch") == "replace":
        return {name: copy.deepcopy(value) for name, value in patch.items() if name != "$patch"}
    if patch.get("$patch") == "delete":
        return None
    kept = patch.get("$retainKeys")
    if kept is not None:
        result = {name: value for name, value in result.items() if name in kept}
    for name, value in patch.items():
        if name in ("$patch", "$retainKeys") or name.startswith("$setElementOrder/"):
            continue
        if name.startswith("$deleteFromPrimitiveList/"):
            listed = name.split("/", 1)[1]
            result[listed] = [item for item in result.get(listed) or [] if item not in value]
        elif value is None:
            result.pop(name, None)
        elif isinstance(value, list) and isinstance(result.get(name), list):
            order = patch.get(f"$setElementOrder/{name}")
            result[name] = _lists(name, result[name], value, order)
        elif isinstance(value, list):
            result[name] = [copy.deepcopy(item) for item in value if not _is_directive(item)]
        else:
            merged = strategic(result.get(name), value)
            if merged is None:
                result.pop(name, None)
            else:
                result[name] = merged
    return result


def _is_directive(item: Any) -> bool:
    return isinstance(item, dict) and "$patch" in item


def _lists(name: str, old: list[Any], new: list[Any], order: list[Any] | None) -> list[Any]:
    if name in _PLAIN:
        return old + [item for item in new if item not in old]
    samples = [item for item in [*new, *old] if isinstance(item, dict) and set(item) - {"$patch"}]
    key = next((key for key in _KEYS.get(name, ()) if samples and all(key in item for item in samples)), None)
    if key is None or any(item == {"$patch": "replace"} for item in new):
        return [copy.deepcopy(item) for item in new if not _is_directive(item)]
    result = list(old)
    for item in new:
        place = next((i for i, other in enumerate(result) if other[key] == item[key]), None)
        if item.get("$patch") == "delete":
            if place is not None:
                del result[place]
        elif place is None:
            result.append({name: copy.deepcopy(value) for name, value in item.items() if name != "$patch"})
        else:
            result[place] = strategic(result[place], item)
    if order:
        places = {item[key]: index for index, item in enumerate(order) if isinstance(item, dict) and key in item}
        result.sort(key=lambda item: places.get(item[key], len(places)))
    return result


def json_patch(target: Object, operations: list[Object]) -> Object:
    """A JSON patch (RFC 6902)."""
    result: Any = copy.deepcopy(target)
    for operation in operations:
        kind = operation.get("op")
        path = _pointer(operation.get("path", ""))
        if kind == "test":
            if _find(result, path) != operation.get("value"):
                raise _refused(f"testing path {operation['path']} has failed")
        elif kind in ("add", "replace"):
            result = _set(result, path, operation.get("value"), kind == "add")
        elif kind == "remove":
            _remove(result, path)
        elif kind in ("move", "copy"):
            value = copy.deepcopy(_find(result, _pointer(operation["from"])))
            if kind == "move":
                _remove(result, _pointer(operation["from"]))
            result = _set(result, path, value, True)
        else:
            raise bad_request(f"unexpected kind: {kind}")
    return result  # type: ignore[no-any-return]


def _pointer(text: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _refused(why: str) -> StatusError:
    return StatusError(422, "Invalid", f"the server rejected our request due to an error in our request: {why}")


def _find(value: Any, path: list[str]) -> Any:
    for part in path:
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise _refused(f"path {'/'.join(path)} does not exist") from None
    return value


def _set(value: Any, path: list[str], new: Any, add: bool) -> Any:
    if not path:
        return new
    parent, last = _find(value, path[:-1]), path[-1]
    if isinstance(parent, list):
        if last == "-":
            parent.append(new)
        elif add:
            parent.insert(int(last), new)
        else:
            parent[int(last)] = new
    elif not add and last not in parent:
        raise _refused(f"replace operation does not apply: path /{'/'.join(path)} does not exist")
    else:
        parent[last] = new
    return value


def _remove(value: Any, path: list[str]) -> None:
    parent, last = _find(value, path[:-1]), path[-1]
    _find(parent, [last])
    del parent[int(last) if isinstance(parent, list) else last]
