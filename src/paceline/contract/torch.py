"""The variables of torchrun, `torch.distributed.launch` and the `env://` init method.

Source: torch 2.13, `torch/distributed/elastic/agent/server/local_elastic_agent.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .base import Contract, Variables
from .placement import MAIN_PORT, PLACEMENT_FIELDS, Placement
from .values import integer, placement_from

if TYPE_CHECKING:
    from collections.abc import Mapping


class TorchContract(Contract):
    """RANK, LOCAL_RANK, WORLD_SIZE, … as torchrun sets them."""

    name: ClassVar[str] = "torch"
    carries: ClassVar[frozenset[str]] = PLACEMENT_FIELDS - {"devices", "endpoints"}

    def write(self, placement: Placement) -> Variables:
        """The variables that torchrun sets for a worker, restart count included."""
        p = placement
        return {
            "RANK": str(p.rank),
            "LOCAL_RANK": str(p.local_rank),
            "WORLD_SIZE": str(p.world_size),
            "LOCAL_WORLD_SIZE": str(p.local_world_size),
            "GROUP_RANK": str(p.node_rank),
            "GROUP_WORLD_SIZE": str(p.node_count),
            "ROLE_RANK": str(p.rank),
            "ROLE_WORLD_SIZE": str(p.world_size),
            "ROLE_NAME": "default",
            "MASTER_ADDR": p.main_address,
            "MASTER_PORT": str(p.main_port),
            "TORCHELASTIC_RESTART_COUNT": str(p.attempt),
            "TORCHELASTIC_RUN_ID": p.job,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }

    def read(self, env: Mapping[str, str]) -> Placement | None:
        """The placement of a torchrun worker; a process with only RANK and WORLD_SIZE counts as one rank per node.

        Without GROUP_RANK, all nodes are assumed to have as many ranks as this one. With LOCAL_RANK but without
        LOCAL_WORLD_SIZE, as scripts for Slurm and MPI often set it, it is inferred from the other numbers.
        """
        if "RANK" not in env or "WORLD_SIZE" not in env:
            return None
        if "LOCAL_RANK" in env and "LOCAL_WORLD_SIZE" not in env:
            before = integer(env, "RANK") - integer(env, "LOCAL_RANK")  # ranks on the nodes before this one
            env = {**env, "LOCAL_WORLD_SIZE": str(before) if before > 0 else env["WORLD_SIZE"]}
        numbers = {"rank": "RANK", "world_size": "WORLD_SIZE"}
        nodes = {}
        if "LOCAL_RANK" in env or "LOCAL_WORLD_SIZE" in env:
            numbers.update(local_rank="LOCAL_RANK", local_world_size="LOCAL_WORLD_SIZE")
        if "GROUP_RANK" in env or "GROUP_WORLD_SIZE" in env:
            numbers.update(node_rank="GROUP_RANK", node_count="GROUP_WORLD_SIZE")
        else:
            on_each_node = max(1, integer(env, "LOCAL_WORLD_SIZE", 1))
            nodes["node_rank"] = integer(env, "RANK") // on_each_node
            nodes["node_count"] = -(-integer(env, "WORLD_SIZE") // on_each_node)  # rounded up
        return placement_from(
            env,
            numbers,
            **nodes,
            main_address=env.get("MASTER_ADDR", "127.0.0.1"),
            main_port=integer(env, "MASTER_PORT", MAIN_PORT),
            attempt=integer(env, "TORCHELASTIC_RESTART_COUNT", 0),
            job=env.get("TORCHELASTIC_RUN_ID", "none"),
        )
