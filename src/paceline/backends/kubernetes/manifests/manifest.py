"""Manifests in general: merging a patch into one, sizes, and YAML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backends.kubernetes.api.object import Object


HIDDEN = "<secret>"  # in a dry run
PLURALS = {"Service": "services", "ConfigMap": "configmaps", "Secret": "secrets", "PodGroup": "podgroups"}
_KEYS = {"volumeMounts": "mountPath", "volumeDevices": "devicePath", "ports": "containerPort", "hostAliases": "ip"}


def merged(base: Any, patch: Any, field: str = "") -> Any:
    """A manifest with a patch: tables are merged, and lists of tables by the key by which Kubernetes merges them.

    A null removes what is there. A list of words, such as a command, replaces the one that is there.
    """
    if isinstance(base, dict) and isinstance(patch, dict):
        found = dict(base)
        for key, value in patch.items():
            if value is None:
                found.pop(key, None)
            else:
                found[key] = merged(base[key], value, key) if key in base else value
        return found
    if isinstance(base, list) and isinstance(patch, list) and all(isinstance(it, dict) for it in (*base, *patch)):
        return _merged_lists(base, patch, _KEYS.get(field, "name"))
    return patch


def _merged_lists(base: Sequence[Object], patch: Sequence[Object], key: str) -> list[Object]:
    found = list(base)
    for item in patch:
        name = item.get(key)
        at = next((n for n, it in enumerate(found) if name and it.get(key) == name), None)
        if at is None:
            found.append(item)
        else:
            found[at] = merged(found[at], item)
    return found


def literal(text: str) -> str:
    """A word of a command, or the value of a variable, that Kubernetes leaves as it is: it would replace $(NAME)."""
    return text.replace("$", "$$")


def quantity(size: int) -> str:
    """Bytes as Kubernetes writes them: 16Gi."""
    for power, unit in ((4, "Ti"), (3, "Gi"), (2, "Mi"), (1, "Ki")):
        if size and size % (1 << 10 * power) == 0:
            return f"{size >> 10 * power}{unit}"
    return str(size)


def text(manifests: Sequence[Object]) -> str:
    """The manifests as YAML, without the values of secrets."""
    import yaml

    shown = [_without_secrets(manifest) for manifest in manifests]
    return yaml.safe_dump_all(shown, sort_keys=False, width=120, allow_unicode=True).rstrip("\n")


def _without_secrets(manifest: Object) -> Object:
    if manifest["kind"] != "Secret":
        return manifest
    rest = {key: value for key, value in manifest.items() if key != "data"}
    return {**rest, "stringData": dict.fromkeys(manifest["data"], HIDDEN)}
