"""JobSet: one replicated Job, whose pods the JobSet controller gives names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Kind, run_policy
from .job import COMPLETION_INDEX, indexed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backends.kubernetes.api.client import Object
    from paceline.backends.kubernetes.manifests.order import Manifest, Order

ROLE = "node"  # the replicated Job


class JobSet(Kind):
    """A JobSet; the controller makes the Service."""

    name = "jobset"
    title = "JobSet"
    group = "jobset.x-k8s.io"
    versions = ("v1alpha2",)
    plural = "jobsets"
    brought_by = "JobSet"
    index_variable = COMPLETION_INDEX
    sets_variables = False
    success = "Completed"
    margin = len(f"-{ROLE}-0-xxxxx")

    def spec(self, order: Order) -> Manifest:
        policy, job = run_policy(order), indexed(order)
        if "activeDeadlineSeconds" in policy:
            job["activeDeadlineSeconds"] = policy.pop("activeDeadlineSeconds")
        return {
            "suspend": order.is_queued,
            **policy,
            "network": {"enableDNSHostnames": True, "subdomain": order.name},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [{"name": ROLE, "replicas": 1, "template": {"spec": job}}],
        }

    def host(self, name: str, number: int) -> str:
        return f"{name}-{ROLE}-0-{number}"

    def nodes(self, found: Object) -> int:
        return int(_job(found)["completions"])

    def main_container(self, found: Object) -> Manifest:
        container: Manifest = _job(found)["template"]["spec"]["containers"][0]
        return container

    def parts(self, name: str) -> Sequence[tuple[str, str]]:
        return [(self.title, name), ("Job", f"{name}-{ROLE}-0")]


def _job(found: Object) -> Manifest:
    job: Manifest = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    return job
