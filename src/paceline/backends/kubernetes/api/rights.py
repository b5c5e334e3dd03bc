"""What a user may do in a namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .client import Cluster


def may(cluster: Cluster, group: str, resource: str, verb: str, *, is_global: bool = False) -> bool:
    """Whether this user has a permission; any user may ask."""
    name, _, sub = resource.partition("/")
    attributes: dict[str, str] = {"verb": verb, "group": group, "resource": name}
    if sub:
        attributes["subresource"] = sub
    if not is_global:
        attributes["namespace"] = cluster.namespace
    review = {
        "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }  # fmt: skip
    answer = cluster.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    return bool((answer.get("status") or {}).get("allowed"))


def missing(cluster: Cluster, group: str, resource: str, verbs: Sequence[str]) -> list[str]:
    """Those of the verbs that this user lacks."""
    return [verb for verb in verbs if not may(cluster, group, resource, verb)]
