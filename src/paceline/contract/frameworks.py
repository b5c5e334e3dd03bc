"""The frameworks whose variables are known."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .base import Contract, Variables
from .horovod import HorovodContract
from .jax import JaxContract
from .mpi import MpiContract
from .paceline import PacelineContract
from .paddle import PaddleContract
from .slurm import SlurmContract
from .tensorflow import TensorflowContract
from .torch import TorchContract
from .values import placement_from

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .placement import Placement


class IndexedContract(Contract):
    """PACELINE_PROCESS_INDEX and PACELINE_PROCESS_NUM: which part of the work is mine, out of how many."""

    name: ClassVar[str] = "indexed"
    carries: ClassVar[frozenset[str]] = frozenset({"rank", "world_size"})

    def write(self, placement: Placement) -> Variables:
        """The index of the process and the number of processes."""
        return {
            "PACELINE_PROCESS_INDEX": str(placement.rank),
            "PACELINE_PROCESS_NUM": str(placement.world_size),
        }

    def read(self, env: Mapping[str, str]) -> Placement | None:
        """The index as the rank, the number of processes as the world size."""
        if "PACELINE_PROCESS_INDEX" not in env:
            return None
        return placement_from(env, {"rank": "PACELINE_PROCESS_INDEX", "world_size": "PACELINE_PROCESS_NUM"})


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
