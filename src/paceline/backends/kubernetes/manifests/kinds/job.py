"""Kinds whose pods an Indexed Job numbers: a Job (the default, which every cluster has), a JobSet, a TrainJob."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.backends.kubernetes.manifests import cloning, objects, replacing
from paceline.backends.kubernetes.manifests.names import GROUP

from .base import Kind, run_policy, service

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backends.kubernetes.api.object import Object
    from paceline.backends.kubernetes.manifests.order import Order

COMPLETION_INDEX = "JOB_COMPLETION_INDEX"


def indexed(order: Order) -> Object:
    """The spec of a Job with a pod for each node."""
    found = {
        "completions": order.nodes, "parallelism": order.nodes, "completionMode": "Indexed",
        **replacing.failure_rules(order), "template": objects.template(order),
    }  # fmt: skip
    if replacing.ends_with_first(order):
        found["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    return found


class BatchJob(Kind):
    """A Job; one with a queue is suspended until what manages the queue, such as Kueue, admits it."""

    name = "job"
    title = "Job"
    group = "batch"
    versions = ("v1",)
    plural = "jobs"
    brought_by = "Kubernetes"
    hosts = ("-0", "-{number}")
    index_variable = COMPLETION_INDEX
    sets_variables = False
    replaces = True

    def spec(self, order: Order) -> Object:
        return {"suspend": order.is_queued, **run_policy(order), **indexed(order)}

    def services(self, order: Order) -> list[Object]:
        return [service(order, order.name, {"job-name": order.name})]

    def nodes(self, found: Object) -> int:
        return int(found["spec"].get("completions") or found["spec"].get("parallelism") or 1)

    def main_container(self, found: Object) -> Object:
        container: Object = found["spec"]["template"]["spec"]["containers"][0]
        return container


# -- JobSet: one replicated Job, whose pods the JobSet controller gives names ------------------------------------------


ROLE = "node"  # the replicated Job
_HOSTS = (f"-{ROLE}-0-0", f"-{ROLE}-0-{{number}}")


class JobSet(Kind):
    """A JobSet; the controller makes the Service."""

    name = "jobset"
    title = "JobSet"
    group = "jobset.x-k8s.io"
    versions = ("v1alpha2",)
    plural = "jobsets"
    brought_by = "JobSet"
    hosts = _HOSTS
    index_variable = COMPLETION_INDEX
    sets_variables = False
    success = "Completed"
    margin = len(f"-{ROLE}-0-xxxxx")

    def spec(self, order: Order) -> Object:
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

    def nodes(self, found: Object) -> int:
        return int(self._job(found)["completions"])

    def main_container(self, found: Object) -> Object:
        container: Object = self._job(found)["template"]["spec"]["containers"][0]
        return container

    def _job(self, found: Object) -> Object:
        job: Object = found["spec"]["replicatedJobs"][0]["template"]["spec"]
        return job

    def parts(self, name: str) -> Sequence[tuple[str, str]]:
        return [(self.title, name), ("Job", f"{name}-{ROLE}-0")]


# -- TrainJob of Kubeflow Trainer: a runtime of the cluster, and patches of its pods -----------------------------------


# What a patch of a pod may have, and what paceline sets for other kinds and the runtime has otherwise.
_PATCHED = (
    "affinity", "imagePullSecrets", "nodeSelector", "schedulingGates", "securityContext", "serviceAccountName",
    "terminationGracePeriodSeconds", "tolerations", "volumes",
)  # fmt: skip
_OMITTED = ("subdomain", "restartPolicy", "enableServiceLinks", "automountServiceAccountToken", "containers")
_PATCHED_POD = (
    "spec", "runtimePatches", "trainingRuntimeSpec", "template", "spec", "replicatedJobs", "template", "spec",
    "template", "spec",
)  # fmt: skip
_GRACE = 30  # seconds that a pod has unless its runtime says otherwise
_OF_CONTAINER = ("volumeMounts", "securityContext")
_OF_TRAINER = ("image", "command", "env", "resources")
_OMITTED_OF_CONTAINER = ("name", "ports", "terminationMessagePath", "terminationMessagePolicy")


class TrainJob(Kind):
    """A TrainJob, of which the operator makes a JobSet; it gives each pod PET_MASTER_ADDR, PET_NODE_RANK, ….

    What the runtime alone decides, such as its scheduler, is refused.
    """

    name = "trainjob"
    title = "TrainJob"
    group = "trainer.kubeflow.org"
    versions = ("v1alpha1",)
    plural = "trainjobs"
    brought_by = "Kubeflow Trainer"
    container = ROLE
    hosts = _HOSTS
    index_variable = COMPLETION_INDEX
    margin = len(f"-{ROLE}-0-xxxxx")

    def check(self, order: Order) -> None:
        super().check(order)
        options, spec = order.options, order.spec
        asked = {
            "--ttl": spec.ttl is not None, "--gang": options.gang is not None, "--host-network": options.host_network,
            "--priority-class": options.priority_class is not None, "--pull-policy": options.pull_policy is not None,
            "--ports": bool(options.ports), "--working-dir": options.plain and spec.working_dir != ".",
        }  # fmt: skip
        for flag, is_asked in asked.items():
            if is_asked:
                raise self.refusal(flag, f"has it from its runtime ({options.runtime}) alone; leave it out")
        if cloning.is_fetched_there(spec):
            raise self.refusal("--sync-mode git", "cannot fetch code; clone it here, and submit from its folder")
        grace = spec.grace if "grace" in spec.given else 0
        if grace > _GRACE and not self.knows(*_PATCHED_POD, "terminationGracePeriodSeconds"):
            raise self.refusal("--grace", f"of this cluster has it from its runtime ({options.runtime}); leave it out")
        self.spec(order)

    def spec(self, order: Order) -> Object:
        template = objects.template(order)
        pod, (main, *others) = template["spec"], template["spec"]["containers"]
        if others:
            raise self.refusal("--pod-template", "has one container; leave the others out")
        for key in (
            *({*pod} - {*_PATCHED, *_OMITTED}),
            *({*main} - {*_OF_CONTAINER, *_OF_TRAINER, *_OMITTED_OF_CONTAINER}),
        ):
            raise self.refusal("--pod-template", f"cannot change {key} of its pods; leave it out")
        container = {"name": ROLE, **{key: main[key] for key in _OF_CONTAINER if key in main}}
        patched = {key: pod[key] for key in _PATCHED if key in pod}
        patch = {"metadata": template["metadata"], "spec": {**patched, "containers": [container]}}
        replicated = {"name": ROLE, "template": {"spec": {"template": patch}}}
        runtime = {"template": {"spec": {"replicatedJobs": [replicated]}}}
        trainer: Object = {
            "image": main["image"], "command": main["command"], "env": main["env"], "numNodes": order.nodes,
            "resourcesPerNode": main["resources"],
        }  # fmt: skip
        if isinstance(order.spec.ranks, int):
            trainer["numProcPerNode"] = order.spec.ranks
        return {
            "runtimeRef": {"name": order.options.runtime},
            "suspend": order.is_queued,
            **run_policy(order),
            "trainer": trainer,
            "runtimePatches": [{"manager": f"{GROUP}/submit", "trainingRuntimeSpec": runtime}],
        }

    def nodes(self, found: Object) -> int:
        return int(found["spec"]["trainer"].get("numNodes") or 1)

    def main_container(self, found: Object) -> Object:
        trainer: Object = found["spec"]["trainer"]
        return trainer

    def parts(self, name: str) -> Sequence[tuple[str, str]]:
        return [(self.title, name), ("JobSet", name), ("Job", f"{name}-{ROLE}-0")]
