"""The schemas of operators' kinds, from the packages that their makers publish."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import defaults, resources

if TYPE_CHECKING:
    from .api import Api
    from .errors import Object
    from .resources import Resource


def schemas(operator: str, minor: int) -> dict[str, Any]:
    """Schemas by group/version/kind and, for what those refer to, by name."""
    return {}


def definition(api: Api, resource: Resource) -> Object:
    """The CustomResourceDefinition of a kind, as the server shows it."""
    versions = [
        {"name": one.version, "served": True, "storage": one.version == resource.version}
        for one in api.custom.values()
        if (one.group, one.plural) == (resource.group, resource.plural)
    ]
    names = {"kind": resource.kind, "plural": resource.plural, "singular": resource.singular,
             "listKind": f"{resource.kind}List"}  # fmt: skip
    spec = {"group": resource.group, "names": names, "versions": versions,
            "scope": "Namespaced" if resource.namespaced else "Cluster"}  # fmt: skip
    body: Object = {
        "apiVersion": resources.DEFINITIONS.api_version, "kind": "CustomResourceDefinition",
        "metadata": {"name": resource.qualified}, "spec": spec,
    }  # fmt: skip
    defaults.metadata(body)
    body["status"] = {"conditions": [{"type": "Established", "status": "True"}], "acceptedNames": names}
    return body
