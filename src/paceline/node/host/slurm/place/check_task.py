"""What the short job of `paceline check` does on each of its nodes: say what there is, and try the other nodes.

Each node writes two files into the folder of the check: `facts-<rank>.json` before it tries the others, and
`routes-<rank>.json` after that. It ends when all have written both, so that each is there for the others.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.contract import TOKEN
from paceline.contract.slurm import expand_hosts
from paceline.node.files import read_json, write_json
from paceline.node.host import routes
from paceline.node.host.slurm.job_folder import names
from paceline.node.machine import gpus, network, software

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FACTS, ROUTES = "facts", "routes"
_PATIENCE = 40.0  # seconds until another node counts as lost
_LOOK = 0.05  # seconds between two looks; the kernel does not report what other machines write
_GRANTED = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def main(path: str) -> int:
    """Examine this node; returns the exit code."""
    folder, env = Path(path), os.environ
    rank, hosts = int(env["SLURM_NODEID"]), expand_hosts(env["SLURM_STEP_NODELIST"])
    token = env[TOKEN].encode()
    listener = routes.RouteListener(token, hosts[rank])
    try:
        write_json(folder / f"{FACTS}-{rank}.json", {**_facts(hosts[rank]), "port": listener.port})
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


def _facts(name: str) -> dict[str, Any]:
    granted = next((os.environ[variable] for variable in _GRANTED if os.environ.get(variable)), "")
    seen = gpus.installed(os.environ)
    addresses = [it.ipv4 for it in network.interfaces() if it.ipv4 and it.up is not False and not it.loopback]
    return {
        "name": name,
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": {name: found and asdict(found) for name, found in software.packages(Path("/")).items()},
        "granted": len([one for one in granted.split(",") if one]),
        "gpus": len(seen.nvidia) + len(seen.amd),
        "gpu_problem": seen.problem,
        "addresses": addresses,
    }


def _wait(folder: Path, kind: str, ranks: Sequence[int]) -> dict[int, Mapping[str, Any]]:
    """What other nodes have written; after a while without those that have not."""
    found: dict[int, Mapping[str, Any]] = {}
    until = time.monotonic() + _PATIENCE
    while len(found) < len(ranks) and time.monotonic() < until and (there := names(folder)):
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
