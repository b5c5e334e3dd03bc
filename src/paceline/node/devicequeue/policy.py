"""Which job gets which devices: pure functions of the entries of the queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.node.spec import Request


@dataclass(frozen=True)
class Entry:
    """A job in the queue."""

    job: str
    priority: int  # a waiting job with a higher priority comes first
    number: int  # of two jobs with the same priority, the one with the lower number comes first
    since: float  # when it joined the queue, or got its devices, in seconds since the epoch
    need: int | tuple[str, ...]  # how many devices, or which
    of: tuple[str, ...]  # the devices that it may have
    share: bool  # whether it shares devices with others that share theirs
    devices: tuple[str, ...] = ()  # what it holds; empty while it waits

    @property
    def order(self) -> tuple[int, int]:
        """The key that sorts waiting jobs, the first to be served first."""
        return -self.priority, self.number


def turn(entries: Iterable[Entry]) -> tuple[Entry, tuple[str, ...]] | None:
    """The next job and the devices it gets; None if the first waiting job must go on waiting, or no job waits.

    No job overtakes another: one that needs one device waits behind one that needs four. A job that shares gets the
    devices with the fewest other jobs.
    """
    entries = list(entries)
    holders = [entry for entry in entries if entry.devices]
    first = min((entry for entry in entries if not entry.devices), key=lambda e: e.order, default=None)
    if first is None:
        return None
    others: dict[str, int] = {}  # device → jobs that have it
    taken: set[str] = set()  # devices that the first job must not have
    for holder in holders:
        for device in holder.devices:
            others[device] = others.get(device, 0) + 1
        if not (holder.share and first.share):
            taken.update(holder.devices)
    if isinstance(first.need, int):
        usable = sorted((d for d in first.of if d not in taken), key=lambda d: others.get(d, 0))
        return (first, tuple(usable[: first.need])) if len(usable) >= first.need else None
    return None if taken.intersection(first.need) else (first, first.need)


def impossible(request: Request) -> str:
    """Why a request can never be granted, or "" where it can."""
    has = f"{len(request.of)} ({', '.join(request.of)})" if request.of else "none"
    if not request.need:
        return "it needs no device"
    if isinstance(request.need, int):
        few = request.need > len(request.of)
        return f"it needs {_count(request.need)}, and this machine has {has}" if few else ""
    unknown = [name for name in request.need if name not in request.of]
    return f"it needs device {', '.join(unknown)}, and this machine has {has}" if unknown else ""


def explain(entries: Iterable[Entry], job: str) -> str | None:
    """What a job waits for, in one line; None if it does not wait."""
    entries = list(entries)
    entry = next((e for e in entries if e.job == job and not e.devices), None)
    if entry is None:
        return None
    need = entry.need
    what = _count(need) if isinstance(need, int) else f"device{'s' if len(need) > 1 else ''} {', '.join(need)}"
    ahead = sum(not e.devices and e.order < entry.order for e in entries)
    wanted = set(entry.of if isinstance(need, int) else need)
    holders = [e.job for e in entries if wanted.intersection(e.devices)]
    parts = [f"waits for {what}"]
    parts += [f"{ahead} job{'s' if ahead > 1 else ''} ahead"] if ahead else []
    parts += [f"held by: {', '.join(holders)}"] if holders else []
    return "; ".join(parts)


def _count(devices: int) -> str:
    return f"{devices} device{'' if devices == 1 else 's'}"
