"""What `paceline check` shows: findings, tables of a cluster, and hosts with the network between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paceline.contract.facts import CoresFacts, DiskFacts, GpusFacts, MemoryFacts, PackageFacts, PythonFacts

MOST_FOR_PAIRS = 8  # up to so many hosts, every pair is measured; with more, only each host with the next one


@dataclass(frozen=True)
class Finding:
    """One thing that would go wrong: an error if no run here can work, else a warning.

    Attributes:
        where: the part of the machine.
        what: what is wrong with it, and the consequence.
        do: what to do.
    """

    level: Literal["error", "warning"]
    where: str
    what: str
    do: str


def errors_first(findings: Iterable[Finding]) -> list[Finding]:
    """Findings in the order in which people read them."""
    return sorted(findings, key=lambda finding: finding.level != "error")


@dataclass(frozen=True)
class Report:
    """What a system has that runs jobs, such as a cluster. The fields are the keys of its JSON.

    Attributes:
        sections: title → rows of two: what, and how it is.
        findings: what would go wrong; errors come first.
        remedy: a file that corrects some of it; "" if there is none.
        remedy_use: what the file is, and what takes it.
    """

    sections: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    remedy: str = ""
    remedy_use: str = ""


@dataclass(frozen=True)
class Clock:
    """How far a host's clock is ahead of this machine's, and the uncertainty, in seconds."""

    offset: float
    uncertainty: float


@dataclass(frozen=True)
class HostReport:
    """What a host has. The fields are the keys of `paceline check --on TARGET -o json`.

    If a host does not answer, all fields but its name are None.

    Attributes:
        address: the address at which other hosts reach it.
        clock: how far it is ahead of this machine's clock, and the uncertainty, in seconds.
        disks: the disks of the folders for jobs.
    """

    name: str
    address: str | None = None
    clock: Clock | None = None
    python: PythonFacts | None = None
    packages: Mapping[str, PackageFacts | None] | None = None
    devices: GpusFacts | None = None
    cores: CoresFacts | None = None
    memory: MemoryFacts | None = None
    disks: Sequence[DiskFacts] | None = None


@dataclass(frozen=True)
class Link:
    """The network route from one host to another.

    Attributes:
        problem: why the other host cannot be reached.
        latency: median of a round trip, in milliseconds; None if it was not measured.
        bandwidth: of one connection, in Mbit/s.
    """

    source: str
    target: str
    problem: str | None = None
    latency: float | None = None
    bandwidth: float | None = None


@dataclass(frozen=True)
class Survey:
    """What hosts have, and the network between them; errors come first."""

    hosts: list[HostReport]
    links: list[Link]
    findings: list[Finding]
