"""Which ranks share a machine, where the launcher has not said so."""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract import ContractError, Placement

if TYPE_CHECKING:
    from collections.abc import Mapping

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine() -> str:
    """Identifies this machine, or container."""
    try:
        return f"{socket.gethostname()} {_BOOT_ID.read_text().strip()}"
    except OSError:
        return secrets.token_hex(16)  # unknown: shared with nobody


def network() -> str:
    """Identifies the loopback interface that processes of this machine share."""
    try:
        return json.dumps([machine(), os.readlink("/proc/self/ns/net"), os.environ.get("PACELINE_NODE_RANK")])
    except OSError:
        return secrets.token_hex(16)


def with_neighbours(placement: Placement, machines: Mapping[int, str], env: Mapping[str, str]) -> Placement:
    """A placement with local rank and local world size, from the machines of all ranks.

    Args:
        placement: this process; only its rank and world size are known.
        machines: rank → `machine()` of every rank.
        env: the environment; a LOCAL_RANK in it stays, if it can be right.
    """
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
