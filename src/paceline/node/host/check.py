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
from dataclasses import asdict
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

    from paceline.contract.messages import Route

FACTS, ROUTES = "facts", "routes"
_PATIENCE = 120.0  # seconds without an order after which the client counts as gone
_NODE_PATIENCE = 40.0  # seconds until another node counts as lost
_LOOK = 0.05  # seconds between two looks; the kernel does not report what other machines write
_GRANTED = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


# -- facts -------------------------------------------------------------------------------------------------------------


def software_facts(folder: Path, packages: Iterable[str] = software.PACKAGES) -> dict[str, Any]:
    """Python and these packages; a file in `folder` is none of them."""
    found = {name: software.package(name, folder) for name in packages}
    return {
        "python": asdict(software.python()),
        "packages": {name: it and asdict(it) for name, it in found.items()},
    }


def machine_facts() -> dict[str, Any]:
    """Devices, cores and memory."""
    return {
        "devices": gpus.installed(os.environ).to_dict(),
        "cores": asdict(hardware.cores()),
        "memory": asdict(machine_memory()),
    }


def disks(root: Path, jobs: Path) -> list[dict[str, Any]]:
    """The disks of the root folder and of the jobs' folder; of one that does not answer, only the path."""
    paths = [root]
    try:
        if os.stat(root).st_dev != os.stat(jobs).st_dev:
            paths.append(jobs)
    except OSError:
        pass  # there is no job yet
    spaces = [(path, hardware.space(path)) for path in paths]
    return [{"path": str(path)} if space is None else asdict(space) for path, space in spaces]


# -- as a client tells over ssh ----------------------------------------------------------------------------------------


def converse(token: bytes, name: str, first: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
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
        write_json(folder / f"{FACTS}-{rank}.json", {**_node_facts(hosts[rank]), "port": listener.port})
        others = [number for number in range(len(hosts)) if number != rank]
        found = _wait(folder, FACTS, others)
        addresses = {hosts[number]: _resolved(hosts[number]) for number in range(len(hosts))}
        tried = {hosts[number]: _route(hosts[number], addresses, found.get(number), token) for number in others}
        problems = {name: problem for name, (_, problem) in addresses.items()}
        write_json(folder / f"{ROUTES}-{rank}.json", {"name": hosts[rank], "names": problems, "routes": tried})
        _wait(folder, ROUTES, others)
    finally:
        listener.close()
    return 0


def _node_facts(name: str) -> dict[str, Any]:
    granted = next((os.environ[variable] for variable in _GRANTED if os.environ.get(variable)), "")
    return {
        **software_facts(Path("/")),
        "devices": gpus.installed(os.environ).to_dict(),
        "name": name,
        "granted": len([one for one in granted.split(",") if one]),
        "addresses": [it.ipv4 for it in network.interfaces() if it.ipv4 and it.up is not False and not it.loopback],
    }


def _wait(folder: Path, kind: str, ranks: Sequence[int]) -> dict[int, Mapping[str, Any]]:
    """What other nodes have written; after a while without those that have not."""
    found: dict[int, Mapping[str, Any]] = {}
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
    name: str, names: Mapping[str, tuple[str | None, str | None]], facts: Mapping[str, Any] | None, token: bytes
) -> dict[str, Any]:
    """Latency and bandwidth to another node, or why it cannot be reached."""
    if facts is None:
        return {"problem": None, "untried": "it has written nothing"}
    address = names[name][0] or next(iter(facts["addresses"]), None)
    if address is None:
        return {"problem": "it has no address"}
    peer = routes.Peer(name, address, int(facts["port"]))
    found = routes.latency(peer, token)
    if "problem" in found:
        return {**found, "address": address}
    return {**found, **routes.bandwidth(peer, token), "address": address}
