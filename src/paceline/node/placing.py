"""Where the ranks of a node stand, and the variables that tell them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.contract import CONTRACTS, OWN_CONTRACT, Placement

from . import devices

if TYPE_CHECKING:
    from .channel import Message
    from .spec import NodeSpec


def place(spec: NodeSpec, start: Message, local_rank: int) -> Placement:
    """Where a rank of this node stands once the coordinator has said "start"."""
    slots = [node["slots"] for node in start["nodes"]]
    node_rank = start["node_rank"]
    mine = (spec.devices[local_rank % len(spec.devices)],) if spec.devices else ()
    return Placement(
        rank=sum(slots[:node_rank]) + local_rank,
        world_size=sum(slots),
        local_rank=local_rank,
        local_world_size=spec.nproc,
        node_rank=node_rank,
        node_count=len(slots),
        main_address=start["main_address"],
        main_port=start["main_port"],
        devices=("0",) if mine and spec.framework == "paddle" else mine,  # it numbers the devices that it sees
        attempt=start["attempt"],
        job=start["job"],
        endpoints=tuple(f"{node['address']}:{port}" for node in start["nodes"] for port in node["ports"]),
    )


def variables(spec: NodeSpec, placement: Placement) -> dict[str, Any]:
    """What a rank finds in its environment, beside what belongs to its run directory."""
    env = {**CONTRACTS[spec.framework].write(placement), **OWN_CONTRACT.write(placement)}
    if spec.framework in ("jax", "tensorflow", "paddle"):  # beside these a script may use torch, say to load data
        env = {**CONTRACTS["torch"].write(placement), **env}
    if spec.framework == "torch":
        env["ROLE_NAME"] = spec.role
        env["TORCHELASTIC_MAX_RESTARTS"] = str(spec.max_restarts)
    elif spec.devices and spec.framework in ("paddle", "indexed"):  # these choose no device: they see theirs alone
        env.update(devices.visibility((spec.devices[placement.local_rank % len(spec.devices)],)))
    return env
