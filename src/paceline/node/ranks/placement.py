"""The placement of each rank of a node, and the variables by which a rank learns it."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from paceline.contract import CONTRACTS, OWN_CONTRACT, RANK_KEY, TOKEN, Placement
from paceline.node.errors import Refused
from paceline.node.machine import devices, processes
from paceline.node.spec import NodeSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.node.rundir.directory import RunDirectory


def place(spec: NodeSpec, start: Mapping[str, Any], local_rank: int) -> Placement:
    """The placement of a rank of this node in an attempt."""
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
        devices=("0",) if mine and spec.framework == "paddle" else mine,  # it numbers the visible devices itself
        attempt=start["attempt"],
        job=start["job"],
        endpoints=tuple(f"{node['address']}:{port}" for node in start["nodes"] for port in node["ports"]),
    )


def variables(spec: NodeSpec, placement: Placement) -> dict[str, Any]:
    """What a rank finds in its environment, beside what belongs to its run directory."""
    env = {**CONTRACTS[spec.framework].write(placement), **OWN_CONTRACT.write(placement)}
    if spec.framework in ("jax", "tensorflow", "paddle"):  # a script may use torch too, say to load data
        env = {**CONTRACTS["torch"].write(placement), **env}
    if spec.framework == "mpi":  # mpirun does not provide what torch.distributed needs
        env.update(MASTER_ADDR=placement.main_address, MASTER_PORT=str(placement.main_port))
    if spec.framework == "torch":
        env["ROLE_NAME"] = spec.role
        env["TORCHELASTIC_MAX_RESTARTS"] = str(spec.max_restarts)
    elif spec.devices and spec.framework in ("paddle", "indexed"):  # these choose no device, so only theirs is visible
        env.update(devices.visibility((spec.devices[placement.local_rank % len(spec.devices)],)))
    return env


def shell_of(run: RunDirectory, rank: int) -> tuple[dict[str, str], str]:
    """The variables that a rank of a job has, and the folder where it started.

    The user's secrets are among them as long as the job runs, the job's own token and key never.

    Raises:
        Refused: the job has no such rank here.
    """
    spec = NodeSpec.load(run.spec)
    status: Mapping[str, Any] = run.read_status() or {}
    local = {entry["rank"]: entry["local_rank"] for entry in status.get("ranks", ())} or {
        number: number for number in range(spec.nproc)
    }
    if rank not in local:
        raise Refused(f"job {spec.job} has no rank {rank} here; its ranks are {', '.join(map(str, local))}")
    if status.get("devices"):
        spec = dataclasses.replace(spec, devices=tuple(status["devices"]))
    mine = {name: os.environ[name] for name in ("TERM", "COLUMNS", "LINES") if name in os.environ}
    env = processes.environment((status.get("agent") or {}).get("pid", 0)) if run.is_held else {}
    env = {name: value for name, value in {**os.environ, **env}.items() if name not in (TOKEN, RANK_KEY)}
    return {**env, **mine, **spec.env, **foreseen(spec, local[rank], status)}, spec.working_dir


def foreseen(spec: NodeSpec, local_rank: int, status: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of a rank: as its job started, or as far as they are known before, for a single node."""
    start = status.get("start")
    if start is None:  # it has not started yet
        port = spec.main_port or 0
        endpoints = spec.nproc if "endpoints" in CONTRACTS[spec.framework].carries else 0
        node = {"address": "127.0.0.1", "slots": spec.nproc, "ports": [port] * endpoints}
        start = {
            "nodes": [node], "node_rank": 0, "main_address": "127.0.0.1", "main_port": port, "attempt": 0,
            "job": spec.job,
        }  # fmt: skip
    return variables(spec, place(spec, start, local_rank))
