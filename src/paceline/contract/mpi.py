"""The variables of mpirun: Open MPI's are written, those of MPICH and Intel MPI (Hydra) are read as well.

Sources: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html; MPICH, `src/pm/hydra/proxy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .base import Contract, Variables
from .values import placement_from

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .placement import Placement

OPEN_MPI = {
    "rank": "OMPI_COMM_WORLD_RANK",
    "world_size": "OMPI_COMM_WORLD_SIZE",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "local_world_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
HYDRA = {
    "rank": "PMI_RANK",
    "world_size": "PMI_SIZE",
    "local_rank": "MPI_LOCALRANKID",
    "local_world_size": "MPI_LOCALNRANKS",
}


class MpiContract(Contract):
    """OMPI_COMM_WORLD_RANK, … as Open MPI's mpirun sets them.

    No variable says which node a rank is on: despite its name, OMPI_COMM_WORLD_NODE_RANK is the rank among the
    processes of this node, over all jobs. No variable says where rank 0 listens either: MPI finds its peers itself.
    """

    name: ClassVar[str] = "mpi"
    carries: ClassVar[frozenset[str]] = frozenset(OPEN_MPI)

    def write(self, placement: Placement) -> Variables:
        """The variables that Open MPI promises to every process."""
        return {
            **{name: str(getattr(placement, field)) for field, name in OPEN_MPI.items()},
            "OMPI_COMM_WORLD_NODE_RANK": str(placement.local_rank),
        }

    def read(self, env: Mapping[str, str]) -> Placement | None:
        """The placement of a process that mpirun started."""
        if OPEN_MPI["rank"] in env:
            return placement_from(env, OPEN_MPI)
        if HYDRA["rank"] in env:
            return placement_from(env, HYDRA)
        return None
