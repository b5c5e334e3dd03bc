"""Which ranks share a machine, where the launcher has not said so."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.contract import ContractError, Placement
from paceline.contract.machine import machine_id

if TYPE_CHECKING:
    from collections.abc import Mapping


def network() -> str:
    """Identifies this machine, as ranks of one agent see it."""
    return json.dumps([machine_id(), os.environ.get("PACELINE_NODE_RANK")])


def with_neighbours(placement: Placement, machines: Mapping[int, str], env: Mapping[str, str]) -> Placement:
    """A placement with local rank and local world size, from the machines of all ranks."""
    here = [rank for rank in sorted(machines) if machines[rank] == machines[placement.rank]]
    in_order = list(dict.fromkeys(machines[rank] for rank in sorted(machines)))
    known = replace(
        placement,
        local_rank=here.index(placement.rank),
        local_world_size=len(here),
        node_rank=in_order.index(machines[placement.rank]),
        node_count=len(in_order),
    )
    try:
        return replace(known, local_rank=int(env["LOCAL_RANK"]))
    except (KeyError, ValueError, ContractError):
        return known
