"""The variables that `jax.distributed.initialize()` needs to be called without arguments.

Source: jax 0.10, `jax/_src/distributed.py` and `jax/_src/clusters/ompi_cluster.py`. JAX takes the coordinator's address
from JAX_COORDINATOR_ADDRESS, but the number of processes and its own only from a cluster that it recognises. The first
it looks for is Open MPI, known by OMPI_MCA_orte_hnp_uri; of this variable JAX reads nothing else once the coordinator's
address is known. JAX_NUM_PROCESSES and JAX_PROCESS_ID are for scripts that pass them on to `initialize` themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .base import Contract, Variables
from .mpi import MpiContract
from .values import NO_GRPC_PROXY, integer, join_address, placement_from, split_address

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .placement import Placement


class JaxContract(Contract):
    """JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID, and what makes JAX see an Open MPI cluster.

    JAX then gives each process the device of its local rank, unless JAX_LOCAL_DEVICE_IDS says otherwise.
    """

    name: ClassVar[str] = "jax"
    carries: ClassVar[frozenset[str]] = MpiContract.carries | {"main_address", "main_port"}

    def write(self, placement: Placement) -> Variables:
        """The variables that let a script call `jax.distributed.initialize()`."""
        address = join_address(placement.main_address, placement.main_port)
        return {
            **MpiContract().write(placement),
            "OMPI_MCA_orte_hnp_uri": f"0.0;tcp://{address}",
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(placement.world_size),
            "JAX_PROCESS_ID": str(placement.rank),
            **NO_GRPC_PROXY,
        }

    def read(self, env: Mapping[str, str]) -> Placement | None:
        """The placement of a process with JAX_PROCESS_ID; one process a node unless Open MPI's variables say more."""
        if "JAX_PROCESS_ID" not in env or "JAX_COORDINATOR_ADDRESS" not in env:
            return None
        host, port = split_address(env, "JAX_COORDINATOR_ADDRESS")
        return placement_from(
            env,
            {"rank": "JAX_PROCESS_ID", "world_size": "JAX_NUM_PROCESSES"},
            local_rank=integer(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
            local_world_size=integer(env, "OMPI_COMM_WORLD_LOCAL_SIZE", 1),
            main_address=host,
            main_port=port,
        )
