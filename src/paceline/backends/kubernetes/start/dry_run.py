"""What `--dry-run` prints: the manifests of a job for `kubectl apply`, and above them what is to be known of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from paceline.backends.kubernetes.api.rights import missing
from paceline.backends.kubernetes.manifests.manifest import HIDDEN, PLURALS, text
from paceline.backends.kubernetes.manifests.names import INSTANCE
from paceline.contract import TOKEN
from paceline.job.errors import UserError

from . import holding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.backends.kubernetes.api.object import Object
    from paceline.backends.kubernetes.manifests.kinds.base import Kind
    from paceline.backends.kubernetes.manifests.order import Order

_MOST_NOTED = 260_000  # bytes: all annotations of an object have 256 KiB, and kubectl apply notes the object in one


def printed(cluster: Cluster, order: Order, warnings: Sequence[str]) -> str:
    """The manifests of a job with its code, in YAML, below the server's warnings about it."""
    kind = order.kind
    made = [kind.manifest(order), *kind.dependents(order)]
    _check_allowed(cluster, order, [_resource(kind, manifest) for manifest in made])
    shown = text(made)
    lines = [*warnings, *comments(order, kind, made, hides=HIDDEN in shown)]
    return "\n".join([*(f"# {line}" for line in lines), shown])


def comments(order: Order, kind: Kind, made: Sequence[Object], *, hides: bool) -> list[str]:
    """What is to be known of the manifests."""
    found = []
    if any(_size(manifest) > _MOST_NOTED for manifest in made):
        found.append("Some objects are too large for kubectl apply alone: kubectl apply --server-side -f FILE")
    if hides:
        found.append(f"Before, write the values of the secrets in place of {HIDDEN}.")
    if TOKEN in order.secrets:
        found.append(f"{TOKEN} is any text that nobody can guess, such as openssl rand -hex 16 prints.")
    resources = [_resource(kind, manifest) for manifest in made]
    names = ",".join(dict.fromkeys(".".join(filter(None, reversed(it))) for it in resources))
    found.append("Objects that kubectl makes are not removed with the job; this removes all:")
    found.append(f"  kubectl delete -n {order.namespace} {names} -l {INSTANCE}={order.name}")
    return found


def _size(manifest: Object) -> int:
    """How large the annotations are when kubectl has noted a manifest: Go writes <, > and & as six letters."""
    noted = json.dumps(manifest, separators=(",", ":"))
    given = manifest["metadata"].get("annotations") or {}
    return len(noted) + 5 * sum(map(noted.count, "<>&")) + sum(map(len, given.values()))


def _resource(kind: Kind, manifest: Object) -> tuple[str, str]:
    """The group of a manifest, and what paths call its kind."""
    group = manifest["apiVersion"].rpartition("/")[0]
    return group, kind.plural if manifest["kind"] == kind.title else PLURALS[manifest["kind"]]


def _check_allowed(cluster: Cluster, order: Order, made: Sequence[tuple[str, str]]) -> None:
    """Refuse what this user may not make: the server tries the job's object alone."""
    wanted = {it: ["create"] for it in made}
    wanted[made[0]].append("patch")
    if holding.is_held(order):
        wanted["batch", "jobs"] = [*wanted.get(("batch", "jobs"), ["create"]), "delete"]
    for (group, plural), verbs in wanted.items():
        if lacking := missing(cluster, group, plural, verbs):
            raise UserError(
                f"you may not {' and '.join(lacking)} {plural} in namespace {cluster.namespace}, which a job needs; "
                f"paceline check{cluster.where} shows the Role that allows it"
            )
