"""What several machines have and how they reach each other: what `paceline check --on TARGET` shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .finding import Finding
    from .hosts import Clock

MOST_FOR_PAIRS = 8  # hosts, of which every pair is measured; of more, each with the next one only


@dataclass(frozen=True)
class HostReport:
    """What a host has. The fields are keys of `paceline check --on TARGET -o json`; all but the name None: no answer.

    Attributes:
        address: under which the others reach it.
        clock: how far ahead of this machine's it is, and how exact that is, in seconds.
        disks: where jobs are kept.
    """

    name: str
    address: str | None = None
    clock: Clock | None = None
    python: Mapping[str, Any] | None = None
    packages: Mapping[str, Any] | None = None
    devices: Mapping[str, Any] | None = None
    cores: Mapping[str, Any] | None = None
    memory: Mapping[str, Any] | None = None
    disks: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Link:
    """The way from one host to another.

    Attributes:
        problem: why there is none.
        latency: of a round trip, the median, in milliseconds; None where it was not measured.
        bandwidth: of one connection, in Mbit/s.
    """

    source: str
    target: str
    problem: str | None = None
    latency: float | None = None
    bandwidth: float | None = None


@dataclass(frozen=True)
class Survey:
    """What hosts have and how they reach each other; errors come first."""

    hosts: list[HostReport]
    links: list[Link]
    findings: list[Finding]
