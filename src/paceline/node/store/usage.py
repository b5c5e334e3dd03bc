"""What this machine and its jobs use now, and what the files of a job have."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract.checkpoint import MANIFEST, NAME
from paceline.contract.machine import machine_id
from paceline.node.files import read_json
from paceline.node.machine import hardware
from paceline.node.machine.network import visible_address

from . import records
from .code_folder import is_claimed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline.contract.records import NodeRecord, UsageRecord
    from paceline.node.machine.gpus import Gpu
    from paceline.node.rundir.directory import RunDirectory

_SECONDS = 0.5  # that the load is measured over


def node(
    home: Path, jobs: Path, devices: Sequence[str], gpus: Callable[[], tuple[Gpu, ...]], *, slots: bool
) -> NodeRecord:
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
        "slots": slots,
        "machine": machine_id(),
    }


def of_jobs(runs: Iterable[RunDirectory]) -> dict[str, UsageRecord]:
    """What the jobs in these run directories use; those that do not run are left out."""
    from paceline.node.telemetry.history import usage

    found = {run.path.name: usage([run]) for run in runs if run.is_held}
    return {name: use for name, use in found.items() if use is not None}


def _holders(home: Path) -> dict[str, tuple[str, ...]]:
    """Device → the jobs that have it."""
    held: dict[str, tuple[str, ...]] = {}
    for entry in records.queue_of(home)():
        for device in entry.devices:
            held[device] = (*held.get(device, ()), entry.job)
    return held


def contents(run: RunDirectory) -> dict[str, int]:
    """The checkpoints and bytes in the run directory of a job, and in its copy of the code if that lies elsewhere."""
    folder = Path(os.path.realpath(run.path))
    code = (read_json(run.job) or {}).get("code") or {}
    job_id = (read_json(run.spec) or {}).get("job_id")
    copy = Path(os.path.realpath(code["path"])) if isinstance(code.get("path"), str) else folder
    has_copy = folder not in (copy, *copy.parents) and isinstance(job_id, str) and is_claimed(copy, job_id)
    sizes: dict[tuple[int, int], int] = {}  # by inode: a file with several names counts once
    checkpoints = 0
    for there in (folder, copy) if has_copy else (folder,):
        for parent, _, files in os.walk(there):
            checkpoints += MANIFEST in files and NAME.fullmatch(os.path.basename(parent)) is not None
            for name in files:
                try:
                    status = os.lstat(os.path.join(parent, name))
                except OSError:  # it is gone, or may not be read
                    continue
                sizes[status.st_dev, status.st_ino] = status.st_size
    return {"checkpoints": checkpoints, "size": sum(sizes.values())}
