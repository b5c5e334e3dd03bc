"""The variables of `horovodrun` with the gloo controller.

Source: Horovod 0.28, `horovod/runner/gloo_run.py` and `horovod/common/gloo/gloo_context.cc`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .base import Contract, Variables
from .placement import MAIN_PORT, PLACEMENT_FIELDS, ContractError, Placement
from .values import integer, placement_from

if TYPE_CHECKING:
    from collections.abc import Mapping


class HorovodContract(Contract):
    """HOROVOD_RANK, HOROVOD_SIZE, … as horovodrun sets them.

    HOROVOD_CROSS_RANK and HOROVOD_CROSS_SIZE count the nodes that have this local rank. They are the node's rank and
    the number of nodes only where every node has as many ranks, so that is asked for. The rendezvous address is that of
    an HTTP key-value store, which horovodrun runs; without it, one must run at the main address and port.
    """

    name: ClassVar[str] = "horovod"
    carries: ClassVar[frozenset[str]] = PLACEMENT_FIELDS - {"devices", "attempt", "job", "endpoints"}

    def write(self, placement: Placement) -> Variables:
        """The variables that horovodrun sets for a worker, gloo as the controller."""
        p = placement
        if p.local_world_size * p.node_count != p.world_size:
            raise ContractError(
                f"horovod needs the same number of ranks on every node, but this node has {p.local_world_size} of "
                f"{p.world_size} ranks on {p.node_count} nodes; take as many on each, or add --horovod paceline"
            )
        return {
            **self.write_on_any_nodes(p),
            "HOROVOD_CROSS_RANK": str(p.node_rank),
            "HOROVOD_CROSS_SIZE": str(p.node_count),
        }

    def write_on_any_nodes(self, placement: Placement) -> Variables:
        """The variables without those that follow from equal nodes; paceline's own API finds out about nodes itself."""
        p = placement
        return {
            "HOROVOD_RANK": str(p.rank),
            "HOROVOD_SIZE": str(p.world_size),
            "HOROVOD_LOCAL_RANK": str(p.local_rank),
            "HOROVOD_LOCAL_SIZE": str(p.local_world_size),
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": p.main_address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(p.main_port),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }

    def read(self, env: Mapping[str, str]) -> Placement | None:
        """The placement of a horovodrun worker."""
        if "HOROVOD_RANK" not in env:
            return None
        return placement_from(
            env,
            {
                "rank": "HOROVOD_RANK",
                "world_size": "HOROVOD_SIZE",
                "local_rank": "HOROVOD_LOCAL_RANK",
                "local_world_size": "HOROVOD_LOCAL_SIZE",
                "node_rank": "HOROVOD_CROSS_RANK",
                "node_count": "HOROVOD_CROSS_SIZE",
            },
            main_address=env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1"),
            main_port=integer(env, "HOROVOD_GLOO_RENDEZVOUS_PORT", MAIN_PORT),
        )
