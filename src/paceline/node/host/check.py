"""What this machine has, and the routes to others: before a job starts, and for `paceline check`.

Over ssh, a client tells each host what to try (`converse`). The nodes of a Slurm job, which no client reaches, meet in
a folder that they share (`main`): each writes `facts-<rank>.json` before it tries the others, and `routes-<rank>.json`
after that. It ends when all have written both, so that each is there for the others.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.contract import TOKEN
from paceline.contract.memory import machine_memory
from paceline.contract.slurm import expand_hosts
from paceline.node.files import list_names, read_json, write_json
from paceline.node.machine import gpus, hardware, network, software

from . import routes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from paceline.contract.facts import (
        DiskFacts,
        MachineFacts,
        NodeFacts,
        NodeRoutes,
        PreflightFacts,
        RouteFacts,
        Software,
    )
    from paceline.contract.messages import Now, Reached, Route

FACTS, ROUTES = "facts", "routes"
_PATIENCE = 120.0  # seconds without an order after which the client counts as gone
_NODE_PATIENCE = 40.0  # seconds until another node counts as lost
_LOOK = 0.05  # seconds between two looks; the kernel does not report what other machines write
_GRANTED = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


# -- facts -------------------------------------------------------------------------------------------------------------


def software_facts(folder: Path, packages: Iterable[str] = software.PACKAGES) -> Software:
    """Python and these packages; a file in `folder` is none of them."""
    python, found = software.python(), {name: software.package(name, folder) for name in packages}
    return {
        "python": {"version": python.version, "executable": python.executable, "environment": python.environment},
        "packages": {
            name: None if it is None else {"version": it.version, "build": it.build} for name, it in found.items()
        },
    }


def machine_facts() -> MachineFacts:
    """Devices, cores and memory."""
    cores, memory = hardware.cores(), machine_memory()
    return {
        "devices": gpus.installed(os.environ).to_dict(),
        "cores": {"present": cores.present, "usable": cores.usable, "quota": cores.quota},
        "memory": {"total": memory.total, "available": memory.available, "limit": memory.limit},
    }


def disks(root: Path, jobs: Path) -> list[DiskFacts]:
    """The disks of the root folder and of the jobs' folder; of one that does not answer, only the path."""
    paths = [root]
    try:
        if os.stat(root).st_dev != os.stat(jobs).st_dev:
            paths.append(jobs)
    except OSError:
        pass  # there is no job yet
    return [_disk(path) for path in paths]


def _disk(path: Path) -> DiskFacts:
    space = hardware.space(path)
    if space is None:
        return {"path": str(path)}
    return {
        "path": space.path, "exists": space.exists, "writable": space.writable, "total": space.total,
        "free": space.free, "free_files": space.free_files,
    }  # fmt: skip


# -- as a client tells over ssh ----------------------------------------------------------------------------------------


def converse(token: bytes, name: str, first: PreflightFacts) -> Iterator[PreflightFacts | Now | Reached | RouteFacts]:
    """Yield the first answer with the port for the other hosts, then answer the orders on stdin until it ends.

    {"do": "clock"}                   {"now": seconds since the epoch}
    {"do": "reach", "peers": […]}     {"reached": {name: None, or why not}}
    {"do": "latency", "peer": …}      {"seconds"} or {"problem"}
    {"do": "bandwidth", "peer": …}    {"bandwidth"} or {"problem"}
    """
    listener = routes.RouteListener(token, name)
    try:
        yield {**first, "listens": listener.port}
        while (order := _next()) is not None:
            if order["do"] == "clock":
                yield {"now": time.time()}
            elif order["do"] == "reach":
                yield {"reached": routes.reach([routes.Peer(**peer) for peer in order["peers"]], token)}
            elif order["do"] == "latency":
                yield routes.latency(routes.Peer(**order["peer"]), token)
            elif order["do"] == "bandwidth":
                yield routes.bandwidth(routes.Peer(**order["peer"]), token)
    finally:
        listener.close()


def _next() -> Route | None:
    """The next order; None at the end of stdin. If the client hangs, this process ends."""
    watch = threading.Timer(_PATIENCE, os._exit, (1,))
    watch.daemon = True
    watch.start()
    line = sys.stdin.buffer.readline()
    watch.cancel()
    order: Route | None = json.loads(line) if line.endswith(b"\n") else None
    return order


# -- in a Slurm job's folder -------------------------------------------------------------------------------------------


def main(path: str) -> int:
    """Examine this node; returns the exit code."""
    folder, env = Path(path), os.environ
    rank, hosts = int(env["SLURM_NODEID"]), expand_hosts(env["SLURM_STEP_NODELIST"])
    token = env[TOKEN].encode()
    listener = routes.RouteListener(token, hosts[rank])
    try:
        write_json(folder / f"{FACTS}-{rank}.json", _node_facts(hosts[rank], listener.port))
        others = [number for number in range(len(hosts)) if number != rank]
        found = _wait(folder, FACTS, others)
        addresses = {hosts[number]: _resolved(hosts[number]) for number in range(len(hosts))}
        tried = {hosts[number]: _route(hosts[number], addresses, found.get(number), token) for number in others}
        problems = {name: problem for name, (_, problem) in addresses.items()}
        routes_here: NodeRoutes = {"name": hosts[rank], "names": problems, "routes": tried}
        write_json(folder / f"{ROUTES}-{rank}.json", routes_here)
        _wait(folder, ROUTES, others)
    finally:
        listener.close()
    return 0


def _node_facts(name: str, port: int) -> NodeFacts:
    granted = next((os.environ[variable] for variable in _GRANTED if os.environ.get(variable)), "")
    return {
        **software_facts(Path("/")),
        "devices": gpus.installed(os.environ).to_dict(),
        "name": name,
        "granted": len([one for one in granted.split(",") if one]),
        "addresses": [it.ipv4 for it in network.interfaces() if it.ipv4 and it.up is not False and not it.loopback],
        "port": port,
    }


def _wait(folder: Path, kind: str, ranks: Sequence[int]) -> dict[int, Any]:
    """What other nodes have written; after a while without those that have not."""
    found: dict[int, Any] = {}
    until = time.monotonic() + _NODE_PATIENCE
    while len(found) < len(ranks) and time.monotonic() < until and (there := list_names(folder)):
        for rank in ranks:
            file = folder / f"{kind}-{rank}.json"
            read = read_json(file) if file.name in there else None
            if read is not None:
                found[rank] = read
        if len(found) < len(ranks):
            time.sleep(_LOOK)
    return found


def _resolved(name: str) -> tuple[str | None, str | None]:
    """The address of a name, or why it has none."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]), None
    except (OSError, UnicodeError) as error:
        return None, (getattr(error, "strerror", None) or str(error)).lower()


def _route(
    name: str, names: Mapping[str, tuple[str | None, str | None]], facts: NodeFacts | None, token: bytes
) -> RouteFacts:
    """Latency and bandwidth to another node, or why it cannot be reached."""
    if facts is None:
        return {"problem": None, "untried": "it has written nothing"}
    address = names[name][0] or next(iter(facts["addresses"]), None)
    if address is None:
        return {"problem": "it has no address"}
    peer = routes.Peer(name, address, facts["port"])
    found = routes.latency(peer, token)
    if "problem" in found:
        return {**found, "address": address}
    return {**found, **routes.bandwidth(peer, token), "address": address}
