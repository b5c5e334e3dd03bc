"""Where one process stands in a job, independent of who started it."""

from __future__ import annotations

from dataclasses import dataclass, fields

MAIN_PORT = 29500  # where the nodes of a job meet, unless another port is given; torchrun's too


class ContractError(ValueError):
    """The launcher's variables contradict each other or cannot be read; the message names them."""

    __module__ = "paceline"  # where users find it


@dataclass(frozen=True)
class Placement:
    """One process of a distributed job.

    Ranks are numbered node by node: rank = sum of the ranks on earlier nodes + local rank.
    """

    rank: int = 0  # position among all processes, 0 … world_size - 1
    world_size: int = 1  # number of processes in the job
    local_rank: int = 0  # position among the processes of this node, 0 … local_world_size - 1
    local_world_size: int = 1  # number of processes on this node
    node_rank: int = 0  # position of this node, 0 … node_count - 1
    node_count: int = 1  # number of nodes
    main_address: str = "127.0.0.1"  # host name or IP address at which rank 0 listens
    main_port: int = MAIN_PORT  # TCP port at which rank 0 listens
    # accelerators this process may use, as the vendor's visibility variable names them; empty for none
    devices: tuple[str, ...] = ()
    attempt: int = 0  # how many times the job was restarted before this start
    job: str = "none"  # identifier of the job, the same on every rank
    # `host:port` of every rank in rank order, each port free for that rank; empty where a framework needs none
    endpoints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for position, size in (
            ("rank", "world_size"),
            ("local_rank", "local_world_size"),
            ("node_rank", "node_count"),
        ):
            if not 0 <= getattr(self, position) < getattr(self, size):
                raise ContractError(
                    f"{position} {getattr(self, position)} is not in 0…{size} - 1 "
                    f"with {size} {getattr(self, size)}; check the launcher's variables"
                )
        if self.local_world_size > self.world_size or self.node_count > self.world_size:
            raise ContractError(
                f"{self.local_world_size} ranks on this node and {self.node_count} nodes do not fit a world size of "
                f"{self.world_size}; check the launcher's variables"
            )
        if self.endpoints and len(self.endpoints) != self.world_size:
            raise ContractError(f"{len(self.endpoints)} endpoints for a world size of {self.world_size}")


PLACEMENT_FIELDS = frozenset(field.name for field in fields(Placement))


def thread_count(cores: int, local_world_size: int) -> int:
    """OMP_NUM_THREADS of each rank: the node's cores shared out among its ranks, at least 1."""
    return max(1, cores // local_world_size)
