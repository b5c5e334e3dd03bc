"""PyTorchJob of the Kubeflow Training Operator: a Master and workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.backends.kubernetes.manifests import objects
from paceline.backends.kubernetes.manifests.order import Role

from .replicas import WORKER_NUMBER, Replicated, replica

if TYPE_CHECKING:
    from paceline.backends.kubernetes.manifests.order import Manifest, Order


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

    def spec(self, order: Order) -> Manifest:
        found = {self.ranks_field: str(order.spec.ranks), **super().spec(order)}
        least, most = order.spec.node_range
        if least < most:  # torchrun reads it from the pods' variables
            restarts = order.spec.max_restarts
            limits = {"minReplicas": least, "maxReplicas": most, "rdzvBackend": "c10d", "maxRestarts": restarts}
            found["elasticPolicy"] = limits
            found["runPolicy"]["backoffLimit"] = restarts
        return found

    def replicas(self, order: Order) -> Manifest:
        """See `Replicated`; an elastic job has workers alone."""
        least, most = order.spec.node_range
        if least == most:
            return super().replicas(order)
        worker = replica(most, objects.template(order, Role(0, WORKER_NUMBER)))
        return {"Worker": {**worker, "restartPolicy": "OnFailure"}}
