"""Manifests in general: merging a patch into one, sizes, and YAML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    Manifest = dict[str, Any]

HIDDEN = "<secret>"  # in a dry run


def merged(base: Any, patch: Any) -> Any:
    """A manifest with a patch: tables are merged, lists of named items by name, other lists are appended to.

    A null removes what is there.
    """
    if isinstance(base, dict) and isinstance(patch, dict):
        found = dict(base)
        for key, value in patch.items():
            if value is None:
                found.pop(key, None)
            else:
                found[key] = merged(base[key], value) if key in base else value
        return found
    if isinstance(base, list) and isinstance(patch, list):
        return _merged_lists(base, patch)
    return patch


def _merged_lists(base: Sequence[Any], patch: Sequence[Any]) -> list[Any]:
    found = list(base)
    for item in patch:
        name = item.get("name") if isinstance(item, dict) else None
        at = next((n for n, it in enumerate(found) if name and isinstance(it, dict) and it.get("name") == name), None)
        if at is None:
            found.append(item)
        else:
            found[at] = merged(found[at], item)
    return found


def quantity(size: int) -> str:
    """Bytes as Kubernetes writes them: 16Gi."""
    for power, unit in ((4, "Ti"), (3, "Gi"), (2, "Mi"), (1, "Ki")):
        if size and size % (1 << 10 * power) == 0:
            return f"{size >> 10 * power}{unit}"
    return str(size)


def text(manifests: Sequence[Manifest]) -> str:
    """The manifests as YAML, without the values of secrets."""
    import yaml

    shown = [_without_secrets(manifest) for manifest in manifests]
    return yaml.safe_dump_all(shown, sort_keys=False, width=120, allow_unicode=True).rstrip("\n")


def _without_secrets(manifest: Manifest) -> Manifest:
    if manifest["kind"] != "Secret":
        return manifest
    hidden = dict.fromkeys(manifest["data"], HIDDEN)
    return {**{key: value for key, value in manifest.items() if key != "data"}, "stringData": hidden}
