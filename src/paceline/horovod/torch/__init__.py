"""The PyTorch API: `import horovod.torch as hvd`."""

from paceline.horovod.common.exceptions import HostsUpdatedInterrupt
from paceline.horovod.common.process_sets import process_set_by_id, process_sets

from . import elastic
from .compression import Compression
from .functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .mpi_ops import *  # noqa: F403
from .mpi_ops import __all__ as _operations
from .optimizer import DistributedOptimizer
from .sync_batch_norm import SyncBatchNorm

__all__ = [  # noqa: PLE0604
    "Compression",
    "DistributedOptimizer",
    "HostsUpdatedInterrupt",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "process_set_by_id",
    "process_sets",
    *_operations,
]
