"""What this machine and its jobs use now."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

from paceline.node.devicequeue import ticket
from paceline.node.machine.meter import Meter
from paceline.node.machine.network import visible_address
from paceline.node.rundir.directory import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from paceline.contract.records import NodeRecord, UsageRecord
    from paceline.node.machine.gpus import Gpu


class Gauge:
    """Measures this machine, from one call to the next."""

    def __init__(
        self,
        home: Path,
        jobs: Path,
        devices: Sequence[str],
        gpus: Callable[[], tuple[Gpu, ...]],
        *,
        slots: bool = False,
    ) -> None:
        """Start to measure."""
        self._home, self._jobs, self._devices, self._slots = home, jobs, tuple(devices), slots
        self._meter = Meter(gpus)

    def machine(self) -> NodeRecord:
        """This machine."""
        self._meter.read()
        holders = self._holders()
        devices = (*self._devices, *sorted(holders.keys() - set(self._devices)))
        return {
            "name": socket.gethostname(),
            "address": visible_address(),
            "devices": devices,
            "allocated": {device: holders[device] for device in devices if device in holders},
            **self._meter.machine(self._jobs),
        }

    def of_jobs(self, names: Sequence[str]) -> dict[str, UsageRecord]:
        """What jobs use; those that do not run are left out."""
        agents = {name: agent for name in names if (agent := self._agent(name)) is not None}
        self._meter.read()
        alone: dict[str, list[str]] = {}
        for device, jobs in self._holders().items():
            if len(jobs) == 1 and not self._slots:
                alone.setdefault(jobs[0], []).append(device)
        return self._meter.jobs(agents, alone)

    def _agent(self, name: str) -> tuple[int, int | None] | None:
        try:
            agent = (RunDirectory(self._jobs / name).read_status() or {})["agent"]
            return int(agent["pid"]), agent["start_time"]
        except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError):
            return None

    def _holders(self) -> dict[str, tuple[str, ...]]:
        """Device → the jobs that have it."""
        held: dict[str, tuple[str, ...]] = {}
        try:
            entries = ticket.overview(ticket.folder_of(self._home))
        except OSError:
            return {}
        for entry in entries:
            for device in entry.devices:
                held[device] = (*held.get(device, ()), entry.job)
        return held
