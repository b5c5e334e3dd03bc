"""The volumes and the queue that a job asks for: with one that is not there it would wait for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.backends.kubernetes.api.errors import ApiError, Gone
from paceline.backends.kubernetes.manifests.names import KUEUE
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.backends.kubernetes.api.object import Object
    from paceline.backends.kubernetes.manifests.order import Order
    from paceline.job.spec import JobSpec

_CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
_LATER = "WaitForFirstConsumer"  # such a claim is bound when its first pod has a node


def check(cluster: Cluster, spec: JobSpec) -> None:
    """Refuse a job whose claims are not there, or not bound, as far as this user may see them."""
    for name in dict.fromkeys(mount.volume for mount in spec.data):
        see = f"see paceline data list{cluster.where}"
        try:
            claim = cluster.get(cluster.path("v1", "persistentvolumeclaims", name))
        except Gone:
            raise UserError(
                f"--data {name}: no PersistentVolumeClaim of that name in namespace {cluster.namespace}; {see}"
            ) from None
        except ApiError as error:
            if error.code != 403:
                raise
            return
        phase = str((claim.get("status") or {}).get("phase") or "Pending")
        if phase != "Bound" and not _is_bound_later(cluster, claim):
            raise UserError(
                f"--data {name}: the PersistentVolumeClaim is {phase}, and not bound to a volume; its events say why: "
                f"kubectl describe pvc {name}"
            )


def check_queue(cluster: Cluster, order: Order) -> None:
    """Refuse a job whose queue is not there, as far as this user may see queues."""
    api_version = next((it for it in KUEUE if order.is_queued and cluster.serves(it, "LocalQueue")), None)
    if api_version is None:
        return
    try:
        known = sorted(str(it["metadata"]["name"]) for it in cluster.items(cluster.path(api_version, "localqueues")))
    except ApiError as error:
        if error.code != 403:
            raise
        return
    if order.spec.queue not in known:
        there = f"there are {', '.join(known)}" if known else "there is none; leave --queue out, or have one made"
        raise UserError(
            f"--queue {order.spec.queue}: no LocalQueue of that name in namespace {cluster.namespace}; {there}"
        )


def _is_bound_later(cluster: Cluster, claim: Object) -> bool:
    """Whether a claim waits for the pod, or that is not known."""
    name = claim["spec"].get("storageClassName")
    if not name:
        return False
    try:
        return bool(cluster.get(f"{_CLASSES}/{name}").get("volumeBindingMode") == _LATER)
    except ApiError as error:
        return error.code == 403
