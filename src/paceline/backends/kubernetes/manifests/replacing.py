"""Pods in place of those that are lost: what a Job says of it, and what its pods need for it. Pure, like `objects`.

The Job controller makes another pod of the same index for one that was deleted, evicted or preempted, whose node is
lost, or whose container was killed. The agents wait for it, and the ranks go on from the last checkpoint.

What ends the job for good must not start again. So a pod that was taken away ends with one of the codes in `TAKEN`,
and an agent that ends a job never does. One that has missed the others ends as if it was killed, so that this counts.
From 1.26 on a policy says so, and disruptions do not count. Before, all pods of a job that has failed end within the
seconds that the controller waits before it replaces a failed pod. So a limit that is lower than the number of pods
ends the Job, while a few pods may still be killed; deleted ones do not count in 1.24.

A Job of MIN:MAX pods that has succeeded must not make those that did not fit before. From 1.31 on pod 0 ends it;
before, pods that begin then end at once. See `stay` in `node/host/pod.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.node.host.pod_format import REPLACED
from paceline.node.signals import EXIT_REPLACED

if TYPE_CHECKING:
    from paceline.backends.kubernetes.api.object import Object
    from paceline.job.spec import JobSpec

    from .order import Order

ADDRESS = "PACELINE_POD_ADDRESS"
_POLICY, _SUCCESS_POLICY = 26, 31  # the first minor versions with podFailurePolicy and successPolicy on
_PATIENCE = 1200.0  # seconds
_MANY = 10  # times that each pod of an elastic job may be killed


def is_replaced(order: Order) -> bool:
    """Whether the job goes on with another pod when one is lost: it may restart, or needs not all pods."""
    least, most = order.spec.node_range
    return order.kind.replaces and not order.options.plain and (order.spec.max_restarts > 0 or least < most)


def peers(order: Order) -> list[str]:
    """Where the agents of a job's pods listen, by index; empty if there is one alone, or none is replaced."""
    if order.nodes == 1 or not is_replaced(order):
        return []
    return [order.kind.address(order.name, index) for index in range(order.nodes)]


def variables(order: Order) -> list[Object]:
    """The variable with a pod's own address: its name may belong to two pods while one is replaced."""
    if not peers(order):
        return []
    return [{"name": ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]


def has_late_pods(order: Order) -> bool:
    """Whether pods may begin when the job has ended: the Job has succeeded when all of MAX have."""
    least, most = order.spec.node_range
    return least < most and is_replaced(order)


def ends_with_first(order: Order) -> bool:
    """Whether the Job has succeeded when pod 0 has, and its controller deletes the pods that have not ended yet."""
    return has_late_pods(order) and order.minor >= _SUCCESS_POLICY


def patient(order: Order) -> JobSpec:
    """The job, whose pods wait for each other longer than the cluster may take to make another pod for a lost one.

    Its pause doubles with each lost pod of the job, up to 600 s, and counts also those that do not count as restarts.
    Source: https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-backoff-failure-policy
    """
    spec = order.spec
    late_pods_wait = has_late_pods(order) and not ends_with_first(order)
    if "join_timeout" in spec.given or late_pods_wait or not is_replaced(order):
        return spec
    return spec.changed({"join_timeout": _PATIENCE})


def failure_rules(order: Order) -> Object:
    """The fields of a Job that say what becomes of a failed pod."""
    if not is_replaced(order):
        return {"backoffLimit": 0}
    (least, most), restarts = order.spec.node_range, order.spec.max_restarts
    if order.minor < _POLICY:
        return {"backoffLimit": min(restarts, least - 1) if least == most else least - 1}
    times = restarts if least == most else max(restarts, _MANY)
    container = order.kind.container
    taken_away = {"containerName": container, "operator": "In", "values": [EXIT_REPLACED]}
    others = {"containerName": container, "operator": "NotIn", "values": list(REPLACED)}
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": taken_away},  # a pod that somebody has deleted has no such condition
        {"action": "FailJob", "onExitCodes": others},
    ]
    return {"backoffLimit": times * most, "podFailurePolicy": {"rules": rules}}
