"""The frameworks whose variables are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .horovod import HorovodContract
from .indexed import IndexedContract
from .jax import JaxContract
from .mpi import MpiContract
from .paceline import PacelineContract
from .paddle import PaddleContract
from .slurm import SlurmContract
from .tensorflow import TensorflowContract
from .torch import TorchContract

if TYPE_CHECKING:
    from .base import Contract

CONTRACTS: dict[str, Contract] = {
    contract.name: contract
    for contract in (
        TorchContract(),
        HorovodContract(),
        PaddleContract(),
        TensorflowContract(),
        JaxContract(),
        MpiContract(),
        SlurmContract(),
        IndexedContract(),
    )
}
OWN_CONTRACT: Contract = PacelineContract()
