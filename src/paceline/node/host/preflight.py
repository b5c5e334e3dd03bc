"""The checks before a job starts: what this machine has, and whether it reaches the job's other hosts."""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.node.machine import gpus, hardware, software

from . import routes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PATIENCE = 120.0  # seconds without an order after which the client counts as gone


def job_facts(root: Path, jobs: Path, framework: str | None) -> dict[str, Any]:
    """What matters to a job: the disk, Python, and the version of the job's framework."""
    found = software.package(framework, root) if framework in software.PACKAGES else None
    return {
        "python": platform.python_version(),
        "framework": framework,
        "version": None if found is None else found.version,
        "disks": _disks(root, jobs),
    }


def all_facts(root: Path, jobs: Path) -> dict[str, Any]:
    """Everything that `paceline check` shows of a host."""
    return {
        "python": asdict(software.python()),
        "packages": {name: found and asdict(found) for name, found in software.packages(root).items()},
        "devices": gpus.installed(os.environ).to_dict(),
        "cores": asdict(hardware.cores()),
        "memory": asdict(hardware.memory()),
        "disks": _disks(root, jobs),
    }


def _disks(root: Path, jobs: Path) -> list[dict[str, Any]]:
    """The disks of the root folder and of the jobs' folder; of one that does not answer, only the path."""
    paths = [root]
    try:
        if os.stat(root).st_dev != os.stat(jobs).st_dev:
            paths.append(jobs)
    except OSError:
        pass  # there is no job yet
    spaces = [(path, hardware.space(path)) for path in paths]
    return [{"path": str(path)} if space is None else asdict(space) for path, space in spaces]


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


def _next() -> dict[str, Any] | None:
    """The next order; None at the end of stdin. If the client hangs, this process ends."""
    watch = threading.Timer(_PATIENCE, os._exit, (1,))
    watch.daemon = True
    watch.start()
    line = sys.stdin.buffer.readline()
    watch.cancel()
    order: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
    return order
