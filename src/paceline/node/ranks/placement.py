"""The placement of a node's ranks, and the environment variables that they get."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from paceline.contract import CONTRACTS, ERROR_FILE, HOROVOD, OWN_CONTRACT, RANK_KEY, TOKEN, ContractError, Placement
from paceline.contract.horovod import HorovodContract
from paceline.contract.stands import NODE_SIDE
from paceline.contract.tensorflow import ROLES as TF_ROLES
from paceline.contract.tensorflow import TensorflowContract
from paceline.contract.values import NO_GRPC_PROXY, PROXIES, join_address
from paceline.node import ENTRY
from paceline.node.errors import Refused
from paceline.node.machine import devices, processes
from paceline.node.spec import NodeSpec, device_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.contract.records import ContainerRecord
    from paceline.node.journal.status import Attempt, NodeEntry
    from paceline.node.rundir.directory import RunDirectory

CHOSEN = "<chosen at start>"  # what a dry run shows for a value that is known only when the job starts
# On PYTHONPATH, it makes `horovod` importable in every Python program that a rank starts.
_HOROVOD_NAMES = os.path.abspath(os.path.join(__file__, "../../../horovod/startup"))
PORT = 70_000_000_000  # placeholder for a port that is chosen when the job starts; no valid port


def place(spec: NodeSpec, start: Attempt, local_rank: int) -> Placement:
    """The placement of a rank of this node in an attempt."""
    slots = [node["slots"] for node in start["nodes"]]
    node_rank = start["node_rank"]
    mine = tuple(filter(None, [device_of(spec.devices, local_rank)]))
    return Placement(
        rank=sum(slots[:node_rank]) + local_rank,
        world_size=sum(slots),
        local_rank=local_rank,
        local_world_size=spec.nproc,
        node_rank=node_rank,
        node_count=len(slots),
        main_address=start["main_address"],
        main_port=start["main_port"],
        devices=("0",) if mine and _sees_own_alone(spec) else mine,  # numbered among the devices that the rank sees
        attempt=start["attempt"],
        job=start["job"],
        endpoints=tuple(join_address(node["address"], port) for node in start["nodes"] for port in node["ports"]),
    )


def variables(spec: NodeSpec, placement: Placement, agent: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of a rank, without those that depend on the run directory; `agent` has those of its agent."""
    contract = CONTRACTS[spec.framework]
    is_ours = HOROVOD in spec.env
    write = contract.write_on_any_nodes if is_ours and isinstance(contract, HorovodContract) else contract.write
    env = {**write(placement), **OWN_CONTRACT.write(placement)}
    if is_ours:
        users = {**agent, **spec.env}.get("PYTHONPATH")
        env["PYTHONPATH"] = os.pathsep.join([_HOROVOD_NAMES, *filter(None, [users])])
    if isinstance(contract, TensorflowContract) and TF_ROLES in spec.env:
        env.update(contract.write_roles(placement, spec.env[TF_ROLES]))
    if spec.framework in ("jax", "tensorflow", "paddle", "mpi"):  # the script may also use torch
        env = {**CONTRACTS["torch"].write(placement), **env}
    if spec.framework == "torch":
        env["ROLE_NAME"] = spec.role
        env["TORCHELASTIC_MAX_RESTARTS"] = str(spec.max_restarts)
    if spec.virtual_local_rank and "LOCAL_RANK" in env:
        env["LOCAL_RANK"] = "0"
    if spec.devices and (spec.framework == "indexed" or _sees_own_alone(spec)):
        env.update(devices.visibility((device_of(spec.devices, placement.local_rank),)))
    if not any(name.lower() in PROXIES for name in (*agent, *spec.env)):  # JAX warns of a variable that does nothing
        env = {name: value for name, value in env.items() if name not in NO_GRPC_PROXY}
    return env


def _sees_own_alone(spec: NodeSpec) -> bool:
    """Whether each rank sees only its own device; Paddle does not choose one itself."""
    return spec.framework == "paddle" or spec.virtual_local_rank


def environment(spec: NodeSpec, placement: Placement, run: RunDirectory) -> dict[str, str]:
    """The variables that a rank has in addition to those of its agent: `variables`, and those of its run directory."""
    error = run.error(placement.attempt, placement.rank)
    env = {**variables(spec, placement), "PACELINE_RUN_DIR": str(run.path), ERROR_FILE: str(error)}
    if spec.hang_after is not None:
        env["PACELINE_HANG_AFTER"] = f"{spec.hang_after:g}"
    if spec.framework == "torch":
        env["TORCHELASTIC_ERROR_FILE"] = str(error.with_suffix(".torch.json"))
    return env


def container_of(run: RunDirectory) -> ContainerRecord | None:
    """The container in which a job's agent and ranks run; None if they run in none of paceline's."""
    return NodeSpec.load(run.spec).container


def shell_of(run: RunDirectory, rank: int, command: Sequence[str]) -> tuple[list[str], dict[str, str], str]:
    """A command for `attach`, a shell if it is empty, the variables of a rank of a job, and the folder of its start.

    They include the user's secrets while the job runs, but never the job's own token and key.
    """
    spec = NodeSpec.load(run.spec)
    status = run.read_status() or {}
    local = {entry["rank"]: entry["local_rank"] for entry in status.get("ranks", ())} or {
        number: number for number in range(spec.nproc)
    }
    if rank not in local:
        raise Refused(f"job {spec.job} has no rank {rank} here; its ranks are {', '.join(map(str, local))}")
    if status.get("devices"):
        spec = devices.granted(spec, tuple(status["devices"]))
    mine = {name: os.environ[name] for name in ("TERM", "COLUMNS", "LINES") if name in os.environ}
    agent = (status.get("agent") or {"pid": 0})["pid"]
    pids = {entry["rank"]: entry["pid"] for entry in status.get("ranks", ())}
    # What a setup has set is in the variables with which the fork server, and so its forks, began.
    env = processes.environment((pids.get(rank) if spec.setup else None) or agent) if run.is_held else {}
    start = status.get("start")
    if start is None:  # it has not started yet
        start = _with_ports(spec, _starts(spec, 0)[0], 0)
    mine.update(spec.env)
    env = {name: value for name, value in {**os.environ, **env}.items() if name not in (TOKEN, RANK_KEY)}
    words = list(command) or [os.environ.get("SHELL", "/bin/sh")]
    if words[0] == NODE_SIDE:
        words = [*spec.python, ENTRY, words[1], str(run.path), *words[2:]]
    return words, {**env, **mine, **variables(spec, place(spec, start, local[rank]), env)}, spec.working_dir


def foreseen(spec: NodeSpec, run: RunDirectory, start: Attempt | None = None) -> list[dict[str, str]]:
    """The variables that each rank will have in addition to those of its agent; `CHOSEN` for unknown values."""
    spec = _granted(spec)
    tables = []
    starts = _starts(spec, PORT) if start is None else [start]  # `_with_ports` adds what is missing
    for each in starts:
        at = _with_ports(spec, each, PORT)
        try:
            tables.append([environment(spec, place(spec, at, rank), run) for rank in range(spec.nproc)])
        except ContractError:  # the framework cannot start so, for example with other numbers of ranks elsewhere
            if not tables:
                raise
    return [{**spec.env, **common(ranks)} for ranks in zip(*tables)]


def common(tables: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The variables that all tables have; `CHOSEN` for a value that differs between them."""
    first, *others = tables
    return {
        name: value.replace(str(PORT), CHOSEN) if all(table[name] == value for table in others) else CHOSEN
        for name, value in first.items()
        if all(name in table for table in others)
    }


def _granted(spec: NodeSpec) -> NodeSpec:
    """The spec once the queue has granted its devices."""
    request = spec.request
    if request is None:
        return spec
    if not isinstance(request.need, int):
        return devices.granted(spec, request.need)
    is_all = request.need == len(request.of) and not request.share
    return devices.granted(spec, request.of if is_all else (CHOSEN,))


def _starts(spec: NodeSpec, unknown: int) -> list[Attempt]:
    """Possible first attempts, with `unknown` for unknown ports; what is the same in all of them is certain."""
    address = spec.local_address or spec.main_address or "127.0.0.1"
    mine: NodeEntry = {"address": address, "slots": spec.nproc, "ports": []}
    if spec.nodes == 1:
        port = spec.main_port or unknown
        return [{"attempt": 0, "nodes": [mine], "node_rank": 0, "main_address": address, "main_port": port,
                 "job": spec.run_id or spec.job}]  # fmt: skip
    starts: list[Attempt] = []
    # How many ranks the other nodes have is known only when they connect.
    for nodes, slots in ((spec.least, spec.nproc), (spec.nodes, spec.nproc + 1)):
        last = nodes - 1
        node_rank = min(spec.node_rank, last) if spec.node_rank is not None else 0 if not starts else last
        is_first = spec.node_rank == 0
        other: NodeEntry = {"address": CHOSEN, "slots": slots, "ports": []}
        starts.append({
            "attempt": 0, "main_port": unknown,
            "nodes": [mine if number == node_rank else other for number in range(nodes)],
            "node_rank": node_rank, "main_address": address if is_first else spec.main_address or address,
            "job": spec.run_id or (spec.job if is_first else CHOSEN),
        })  # fmt: skip
    return starts


def _with_ports(spec: NodeSpec, start: Attempt, port: int) -> Attempt:
    """The attempt with a port for each rank, if the framework needs these."""
    needs = "endpoints" in CONTRACTS[spec.framework].carries
    nodes: list[NodeEntry] = [{**node, "ports": [port] * (node["slots"] if needs else 0)} for node in start["nodes"]]
    return {**start, "nodes": nodes}
