"""The TensorFlow API: `import horovod.tensorflow as hvd`. Torch does the collectives here, too."""

from typing import Any

try:
    from paceline.horovod.common.exceptions import HostsUpdatedInterrupt
    from paceline.horovod.common.process_sets import process_set_by_id, process_sets

    from . import elastic
    from .compression import Compression
    from .functions import (
        BroadcastGlobalVariablesHook,
        allgather_object,
        broadcast_global_variables,
        broadcast_object,
        broadcast_object_fn,
        broadcast_variables,
    )
    from .gradients import DistributedGradientTape, PartialDistributedGradientTape
    from .mpi_ops import *  # noqa: F403
    from .mpi_ops import __all__ as _operations
    from .optimizer import DistributedOptimizer
    from .util import _executing_eagerly  # noqa: F401 - scripts call it as hvd._executing_eagerly
except ModuleNotFoundError as error:
    if error.name not in ("tensorflow", "torch"):
        raise
    raise ImportError(
        f"horovod.tensorflow needs {error.name}: TensorFlow for the model, and torch, whose gloo and NCCL exchange the "
        f"tensors of all frameworks here; "
        f"pip install {error.name}"
    ) from None

__all__ = [  # noqa: PLE0604
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HostsUpdatedInterrupt",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",  # noqa: F405 - see `__getattr__`
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "elastic",
    "process_set_by_id",
    "process_sets",
    *_operations,
]


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNormalization":  # the import of Keras takes as long as that of TensorFlow
        from .sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    raise AttributeError(f"module 'horovod.tensorflow' has no attribute {name!r}")
