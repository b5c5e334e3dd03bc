"""Inspects this machine: everything that `paceline check` shows, in one record."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline._version import __version__
from paceline.contract.memory import Memory, machine_memory
from paceline.job.errors import UserError
from paceline.job.paths import jobs_folder
from paceline.node.machine import gpus, hardware, network, software
from paceline.node.readers import Begun

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .report import Finding

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Inspection:
    """What a machine has. The fields, and their fields, are the keys of `paceline check -o json`.

    Attributes:
        paceline: version of paceline.
        packages: the frameworks and numpy; None for one that is not installed.
        shared_memory: /dev/shm; None if there is none.
        ports: those of torch and paceline whose numbers are not fixed; None if they are not known.
        jobs: the folder of jobs; None if it cannot be examined.
        shadows: files in the current folder that hide a module from the scripts beside them: module → file.
        variables: environment variables that change how a job runs, as they are set here.
    """

    paceline: str
    python: software.Python
    packages: Mapping[str, software.Package | None]
    devices: gpus.Gpus
    cores: hardware.Cores
    memory: Memory
    shared_memory: hardware.Space | None
    jobs: hardware.Space | None
    interfaces: tuple[network.Interface, ...]
    host: network.HostName
    gloo: network.Choice
    ports: network.PortRange | None
    limits: hardware.Limits
    shadows: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Inspected:
    """What a machine has, and what would go wrong there."""

    seen: Inspection
    findings: list[Finding]

    def to_dict(self) -> dict[str, object]:
        """The keys of `paceline check -o json`."""
        findings = [asdict(finding) for finding in self.findings]
        return {**asdict(self.seen), "devices": self.seen.devices.to_dict(), "findings": findings}


# Variables whose value may be shown; that of a proxy may contain a password.
_VARIABLES = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", *gpus.VISIBILITY)


def inspect_local(env: Mapping[str, str] | None = None, folder: Path | None = None) -> Inspection:
    """Inspect this machine as a job would find it that is started with these variables in this folder.

    Imports no framework. nvidia-smi and the resolver get about a second, in parallel.
    """
    env = os.environ if env is None else env
    try:
        folder = Path.cwd() if folder is None else folder
    except FileNotFoundError:
        raise UserError("the current folder no longer exists; go to another one") from None
    asking = Begun(lambda: gpus.installed(env))
    host, interfaces = network.host_name(), network.interfaces()
    found = Inspection(
        paceline=__version__,
        python=software.python(),
        packages=software.packages(folder),
        devices=gpus.Gpus(),
        cores=hardware.cores(),
        memory=machine_memory(),
        shared_memory=hardware.space(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None,
        jobs=_jobs(),
        interfaces=interfaces,
        host=host,
        gloo=network.gloo_choice(env, interfaces, host),
        ports=network.port_range(),
        limits=hardware.limits(),
        shadows={} if getattr(sys.flags, "safe_path", False) else software.shadows(folder),
        variables={name: env[name] for name in _VARIABLES if name in env},
    )
    return replace(found, devices=asking.result())


def _jobs() -> hardware.Space | None:
    try:
        return hardware.space(jobs_folder())
    except UserError:  # no HOME, and a user unknown to the system, as in some containers
        return None
