"""PyTorchJob of the Kubeflow Training Operator: a Master and workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.backends.kubernetes.manifests import objects
from paceline.backends.kubernetes.manifests.order import Role

from .replicas import REPLICA_INDEX, Replicated, replica

if TYPE_CHECKING:
    from paceline.backends.kubernetes.manifests.order import Manifest, Order


class PyTorchJob(Replicated):
    """The operator gives each pod MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK, which is that of the node."""

    name = "pytorchjob"
    title = "PyTorchJob"
    plural = "pytorchjobs"
    field = "pytorchReplicaSpecs"
    container = "pytorch"

    def spec(self, order: Order) -> Manifest:
        """See `Kind`."""
        found = {"nprocPerNode": str(order.spec.ranks), **super().spec(order)}
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
        worker = replica(most, objects.template(order, Role(0, REPLICA_INDEX)))
        return {"Worker": {**worker, "restartPolicy": "OnFailure"}}
