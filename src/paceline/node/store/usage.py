"""What this machine and its jobs use now."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from paceline.node.devicequeue import ticket
from paceline.node.machine import hardware
from paceline.node.machine.network import visible_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from paceline.contract.records import NodeRecord, UsageRecord
    from paceline.node.machine.gpus import Gpu
    from paceline.node.rundir.directory import RunDirectory

_SECONDS = 0.5  # that the load is measured over


def node(home: Path, jobs: Path, devices: Sequence[str], gpus: Callable[[], tuple[Gpu, ...]]) -> NodeRecord:
    """This machine; takes `_SECONDS`."""
    begun, before = time.monotonic(), hardware.busy_seconds()
    seen = tuple(gpu.record() for gpu in gpus())
    time.sleep(max(0.0, begun + _SECONDS - time.monotonic()))
    busy = hardware.busy_seconds() - before
    load = round(max(0.0, busy) / (time.monotonic() - begun), 3)
    holders = _holders(home)
    names = (*devices, *sorted(holders.keys() - set(devices)))
    return {
        "name": socket.gethostname(),
        "address": visible_address(),
        "devices": names,
        "allocated": {device: holders[device] for device in names if device in holders},
        **hardware.capacity(jobs),
        "load": load,
        "gpus": seen,
    }


def of_jobs(runs: Iterable[RunDirectory]) -> dict[str, UsageRecord]:
    """What the jobs in these run directories use; those that do not run are left out."""
    from paceline.node.telemetry.history import usage

    found = {run.path.name: usage([run]) for run in runs if run.is_held}
    return {name: use for name, use in found.items() if use is not None}


def _holders(home: Path) -> dict[str, tuple[str, ...]]:
    """Device → the jobs that have it."""
    held: dict[str, tuple[str, ...]] = {}
    try:
        entries = ticket.overview(ticket.folder_of(home))
    except OSError:
        return {}
    for entry in entries:
        for device in entry.devices:
            held[device] = (*held.get(device, ()), entry.job)
    return held
