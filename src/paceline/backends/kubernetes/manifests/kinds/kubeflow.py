"""The kinds of kubeflow.org, by the Training Operator: replicas in roles, a run policy, and conditions."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from paceline.backends.kubernetes.manifests import objects
from paceline.backends.kubernetes.manifests.order import Role

from .base import Kind, run_policy

if TYPE_CHECKING:
    from paceline.backends.kubernetes.api.object import Object
    from paceline.backends.kubernetes.manifests.order import Order

WORKER_NUMBER = "metadata.name"  # the field of a worker's pod that ends with its number; labels differ by operator


class Replicated(Kind):
    """A kind whose pods have roles. Its operator makes a Service for each, called as the pod."""

    group = "kubeflow.org"
    versions: ClassVar[tuple[str, ...]] = ("v1",)
    brought_by = "the Kubeflow Training Operator"
    margin = len("-worker")
    makes_groups = True
    success = "Succeeded"
    field: ClassVar[str]  # the replicas in the spec
    main_role: ClassVar[str | None] = "Master"  # of node 0, if it has a role of its own; otherwise all are workers
    hosts = ("-master-0", "-worker-{before}")
    ranks_field: ClassVar[str | None] = None  # says how many ranks a pod has

    def check(self, order: Order) -> None:
        if self.main_role is None:
            super().check(order)
        spec, policy, options = order.spec, self._policy, order.options
        asked = {
            "--queue": (order.is_queued, (*policy, "suspend")),
            "--gang": (options.gang is not None, (*policy, "schedulingPolicy")),
            "--ttl": (spec.ttl is not None, (*policy, "ttlSecondsAfterFinished")),
            "--time-limit": (options.plain and spec.time_limit is not None, (*policy, "activeDeadlineSeconds")),
        }
        if self.ranks_field is not None:
            asked["-n"] = options.plain and objects.ranks(spec) > 1, ("spec", self.ranks_field)
        for flag, (is_asked, path) in asked.items():
            if is_asked and not self.knows(*path):
                raise self.refusal(flag, f"of {self.api_version} here has no {path[-1]}; leave it out")

    @property
    def _policy(self) -> tuple[str, ...]:
        """Where the run policy is: kinds of older operators have it in the spec itself."""
        return ("spec", "runPolicy") if self.knows("spec", "runPolicy") else ("spec",)

    def spec(self, order: Order) -> Object:
        policy = self.policy(order)
        return {**({"runPolicy": policy} if len(self._policy) > 1 else policy), self.field: self.replicas(order)}

    def replicas(self, order: Order) -> Object:
        """The roles; a pod that fails is not made again."""
        workers, found = order.nodes, {}
        if self.main_role is not None:
            found[self.main_role] = replica(1, objects.template(order))
            workers -= 1
        if workers:
            role = Role(order.nodes - workers, WORKER_NUMBER)
            found["Worker"] = replica(workers, objects.template(order, role))
        return found

    def policy(self, order: Order) -> Object:
        """The run policy."""
        options = order.options
        # Agents end by themselves, and their logs are to stay; nobody ends the pods of a plain job.
        clean = options.clean_pods or ("running" if options.plain else "none")
        found: Object = {
            "cleanPodPolicy": clean.capitalize(), "backoffLimit": 0, **run_policy(order),
        }  # fmt: skip
        if self.knows(*self._policy, "suspend"):
            found["suspend"] = order.is_queued
        if options.gang is not None:
            scheduling: Object = {"minAvailable": order.nodes}
            if options.gang == "volcano" and order.spec.queue:
                scheduling["queue"] = order.spec.queue
            if options.priority_class is not None:
                scheduling["priorityClass"] = options.priority_class
            found["schedulingPolicy"] = scheduling
        return found

    def address(self, name: str, number: int) -> str:
        return self.host(name, number)

    def can_suspend(self, found: Object) -> bool:
        return "suspend" in _policy_of(found)

    def suspension(self, found: Object, value: bool) -> Object:
        if not self.can_suspend(found):
            raise self.refusal("stop", f"of {self.api_version} here cannot be suspended; delete it")
        return {"runPolicy": {"suspend": value}}

    def is_suspended(self, found: Object) -> bool:
        return bool(_policy_of(found).get("suspend"))

    def ttl(self, found: Object) -> int | None:
        value = _policy_of(found).get("ttlSecondsAfterFinished")
        return None if value is None else int(value)

    def nodes(self, found: Object) -> int:
        return sum(int(it.get("replicas", 1)) for it in found["spec"][self.field].values())

    def main_container(self, found: Object) -> Object:
        replicas = found["spec"][self.field]
        main = replicas.get(self.main_role) or replicas["Worker"]
        container: Object = main["template"]["spec"]["containers"][0]
        return container


def _policy_of(found: Object) -> Object:
    """The run policy of an object."""
    policy: Object = found["spec"].get("runPolicy") or found["spec"]
    return policy


def replica(count: int, template: Object) -> Object:
    """A role."""
    return {"replicas": count, "restartPolicy": "Never", "template": template}


# -- PyTorchJob: a Master and workers ----------------------------------------------------------------------------------


class PyTorchJob(Replicated):
    """The operator gives each pod MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK, which is that of the node."""

    name = "pytorchjob"
    title = "PyTorchJob"
    plural = "pytorchjobs"
    field = "pytorchReplicaSpecs"
    container = "pytorch"
    ranks_field = "nprocPerNode"

    def check(self, order: Order) -> None:
        super().check(order)
        least, most = order.spec.node_range
        if least < most and not self.knows("spec", "elasticPolicy"):
            raise self.refusal("--nnodes MIN:MAX", f"of {self.api_version} here has no elasticPolicy; give one number")

    def spec(self, order: Order) -> Object:
        found = {self.ranks_field: str(order.spec.ranks), **super().spec(order)}
        least, most = order.spec.node_range
        if least < most:  # torchrun reads it from the pods' variables
            restarts = order.spec.max_restarts
            limits = {"minReplicas": least, "maxReplicas": most, "rdzvBackend": "c10d", "maxRestarts": restarts}
            found["elasticPolicy"] = limits
            found["runPolicy"]["backoffLimit"] = restarts
        return found

    def replicas(self, order: Order) -> Object:
        """See `Replicated`; an elastic job has workers alone."""
        least, most = order.spec.node_range
        if least == most:
            return super().replicas(order)
        worker = replica(most, objects.template(order, Role(0, WORKER_NUMBER)))
        return {"Worker": {**worker, "restartPolicy": "OnFailure"}}


# -- TFJob: a Chief and workers ----------------------------------------------------------------------------------------


class TFJob(Replicated):
    """The operator gives each pod TF_CONFIG, in which node 0 is the chief."""

    name = "tfjob"
    title = "TFJob"
    plural = "tfjobs"
    field = "tfReplicaSpecs"
    container = "tensorflow"
    main_role = "Chief"
    hosts = ("-chief-0", "-worker-{before}")


# -- PaddleJob: workers ------------------------------------------------------------------------------------------------


class PaddleJob(Replicated):
    """The operator gives each pod PADDLE_MASTER and PADDLE_NNODES; the first worker is the master."""

    name = "paddlejob"
    title = "PaddleJob"
    plural = "paddlejobs"
    field = "paddleReplicaSpecs"
    container = "paddle"
    main_role = None
    hosts = ("-worker-0", "-worker-{number}")
