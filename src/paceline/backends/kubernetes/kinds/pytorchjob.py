"""PyTorchJob of the Kubeflow Training Operator: a Master and workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .replicas import Replicated

if TYPE_CHECKING:
    from paceline.backends.kubernetes.objects import Manifest, Order


class PyTorchJob(Replicated):
    """The operator gives each pod MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK, which is that of the node."""

    name = "pytorchjob"
    title = "PyTorchJob"
    plural = "pytorchjobs"
    field = "pytorchReplicaSpecs"
    container = "pytorch"

    def spec(self, order: Order) -> Manifest:
        """See `Kind`."""
        return {"nprocPerNode": str(order.spec.ranks), **super().spec(order)}
