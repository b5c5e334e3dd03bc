"""Training that goes on after ranks fail, or come and go."""

from paceline.horovod.common.elastic import State
from paceline.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

from .commits import run
from .sampler import ElasticSampler
from .state import ObjectState, TorchState

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]
