"""Gang scheduling: a scheduler that starts the pods of a job together, or none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.backends.kubernetes.api.object import Object

    from .order import Order

# The API that has the scheduler's PodGroups, and the name by which pods ask for the scheduler.
GROUPS = {"volcano": "scheduling.volcano.sh/v1beta1", "coscheduling": "scheduling.x-k8s.io/v1alpha1"}
_SCHEDULERS = {"volcano": "volcano", "coscheduling": "scheduler-plugins-scheduler"}
_TASK = "worker"  # what volcano calls the pods with the same template


def mark(template: Object, order: Order) -> None:
    """Let the pods of a template be started together."""
    gang = order.options.gang
    if gang is None:
        return
    template["spec"]["schedulerName"] = _SCHEDULERS[gang]
    if not order.kind.makes_groups:
        meta = template["metadata"]
        if gang == "volcano":
            names = {"scheduling.k8s.io/group-name": order.name, "volcano.sh/task-spec": _TASK}
            meta["annotations"] = {**meta.get("annotations", {}), **names}
        else:
            meta["labels"]["scheduling.x-k8s.io/pod-group"] = order.name


def pod_groups(order: Order, meta: Object) -> list[Object]:
    """The PodGroup of a job, unless the operator of its kind makes it."""
    gang = order.options.gang
    if gang is None or order.kind.makes_groups:
        return []
    spec: Object = {"minMember": order.nodes}
    if gang == "volcano":
        spec["minTaskMember"] = {_TASK: order.nodes}
        if order.spec.queue:
            spec["queue"] = order.spec.queue
        if order.options.priority_class is not None:
            spec["priorityClassName"] = order.options.priority_class
    return [{"apiVersion": GROUPS[gang], "kind": "PodGroup", "metadata": meta, "spec": spec}]
