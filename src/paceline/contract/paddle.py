"""The variables of `python -m paddle.distributed.launch`.

Source: paddlepaddle 3.3, `paddle/distributed/launch/controllers/collective.py` and `paddle/distributed/parallel.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .base import Contract, Variables
from .placement import PLACEMENT_FIELDS, ContractError, Placement
from .values import join_address, placement_from, split_address, split_list

if TYPE_CHECKING:
    from collections.abc import Mapping


class PaddleContract(Contract):
    """PADDLE_TRAINER_ID, PADDLE_TRAINERS_NUM, … as Paddle's launcher sets them for a trainer.

    PADDLE_LOG_DIR and POD_NAME are not set.
    """

    name: ClassVar[str] = "paddle"
    carries: ClassVar[frozenset[str]] = PLACEMENT_FIELDS - {"node_rank", "attempt", "job"}
    unsets: ClassVar[tuple[str, ...]] = ("http_proxy", "https_proxy", "MASTER_ADDR", "MASTER_PORT")

    def write(self, placement: Placement) -> Variables:
        """The variables of a trainer; gloo where it has no devices."""
        p = placement
        if not p.endpoints and p.world_size > 1:
            raise ContractError(f"paddle needs the endpoints of all {p.world_size} trainers, and none are known")
        variables = {
            "PADDLE_MASTER": join_address(p.main_address, p.main_port),
            "PADDLE_GLOBAL_SIZE": str(p.world_size),
            "PADDLE_LOCAL_SIZE": str(p.local_world_size),
            "PADDLE_GLOBAL_RANK": str(p.rank),
            "PADDLE_LOCAL_RANK": str(p.local_rank),
            "PADDLE_NNODES": str(p.node_count),
            "PADDLE_TRAINER_ID": str(p.rank),
            "PADDLE_TRAINERS_NUM": str(p.world_size),
            "PADDLE_RANK_IN_NODE": str(p.local_rank),
        }
        if p.endpoints:
            variables["PADDLE_TRAINER_ENDPOINTS"] = ",".join(p.endpoints)
            variables["PADDLE_CURRENT_ENDPOINT"] = p.endpoints[p.rank]
        if p.devices:
            variables["FLAGS_selected_gpus"] = ",".join(p.devices)
        else:
            variables["PADDLE_DISTRI_BACKEND"] = "gloo"
        return variables

    def read(self, env: Mapping[str, str]) -> Placement | None:
        """The placement of a trainer that Paddle's launcher started."""
        if "PADDLE_TRAINER_ID" not in env or "PADDLE_MASTER" not in env:
            return None
        host, port = split_address(env, "PADDLE_MASTER")
        return placement_from(
            env,
            {
                "rank": "PADDLE_TRAINER_ID",
                "world_size": "PADDLE_TRAINERS_NUM",
                "local_rank": "PADDLE_LOCAL_RANK",
                "local_world_size": "PADDLE_LOCAL_SIZE",
                "node_count": "PADDLE_NNODES",
            },
            main_address=host,
            main_port=port,
            devices=split_list(env.get("FLAGS_selected_gpus", "")),
            endpoints=split_list(env.get("PADDLE_TRAINER_ENDPOINTS", "")),
        )
