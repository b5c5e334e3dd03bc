"""The default: an Indexed Job of batch/v1 and a headless Service, which every cluster has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.backends.kubernetes.manifests import objects, replacing
from paceline.backends.kubernetes.options import PORT

from .base import Kind, run_policy

if TYPE_CHECKING:
    from paceline.backends.kubernetes.api.client import Object
    from paceline.backends.kubernetes.manifests.order import Manifest, Order

COMPLETION_INDEX = "JOB_COMPLETION_INDEX"


def indexed(order: Order) -> Manifest:
    """The spec of a Job with a pod for each node."""
    return {
        "completions": order.nodes,
        "parallelism": order.nodes,
        "completionMode": "Indexed",
        **replacing.failure_rules(order),
        **replacing.success_rules(order),
        "template": objects.template(order),
    }


class BatchJob(Kind):
    """A Job; one with a queue is suspended until what manages the queue, such as Kueue, admits it."""

    name = "job"
    title = "Job"
    group = "batch"
    versions = ("v1",)
    plural = "jobs"
    brought_by = "Kubernetes"
    index_variable = COMPLETION_INDEX
    sets_variables = False
    replaces = True

    def spec(self, order: Order) -> Manifest:
        template = indexed(order)
        return {**template, "suspend": order.is_queued, **run_policy(order), "template": template["template"]}

    def host(self, name: str, number: int) -> str:
        return f"{name}-{number}"

    def services(self, order: Order) -> list[Manifest]:
        """The Service that gives each pod a name, also before it is ready."""
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": order.name},
            "ports": [{"name": "agents", "port": PORT}],
        }
        return [{"apiVersion": "v1", "kind": "Service", "metadata": objects.meta(order), "spec": spec}]

    def nodes(self, found: Object) -> int:
        return int(found["spec"].get("completions") or found["spec"].get("parallelism") or 1)

    def main_container(self, found: Object) -> Manifest:
        container: Manifest = found["spec"]["template"]["spec"]["containers"][0]
        return container
