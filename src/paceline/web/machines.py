"""The machines of all targets as the page shows them: which of them are one, who has their devices, how much they did.

The server remembers what targets have answered, so that a machine that answers no more is still shown, with the time
since when, and so that the last hour is known without asking again.
"""

from __future__ import annotations

import contextlib
import math
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, TypedDict

from paceline.backends.base import Recorded
from paceline.backends.remote.here import is_here
from paceline.contract.machine import machine_id
from paceline.job.errors import UserError
from paceline.job.job import SILENT, Node
from paceline.job.quantities import show_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paceline.backends.base import Backend
    from paceline.contract.records import NodeHistory
    from paceline.job.job import Job

STEP = 60  # seconds between two points of a curve
POINTS = 60
_MOST_JOBS = 8  # whose histories are read
_MOST_HOLDERS = 64  # of a machine that are shown
MOST = 100  # machines with all details in one answer
_SURE = 150.0  # seconds after which a target's curves have a gap, which histories may fill

_FIELDS = tuple(it.name for it in fields(Node))
_AT_WORK = ("STARTING", "RUNNING", "RESTARTING")

Curve = list["float | None"]  # shares of what there is; None where nothing is known


class Holder(TypedDict):
    """A job that has devices of a machine, or runs there."""

    name: str
    target: str | None
    user: str | None
    since: str | None
    until: str | None  # at the latest
    devices: list[str]
    count: int
    ranks: int


class Silence(TypedDict):
    """That a machine does not answer: since when, and since when it was asked."""

    since: str | None
    asked: str | None


@dataclass(frozen=True)
class Row:
    """A machine as the page shows it.

    Attributes:
        node: what its target has answered.
        key: what a machine has in common in all targets.
        here: whether it is this one.
        holders: the jobs that have it.
        silent: None if it answers.
    """

    node: Node
    key: str
    here: bool
    holders: list[Holder]
    silent: Silence | None = None

    def to_dict(self, *, brief: bool = False) -> dict[str, object]:
        """What the page gets; without the details of machines that are not shown if it is `brief`."""
        node = replace(self.node, gpus=(), devices=(), allocated={}) if brief else self.node
        return {**{name: getattr(node, name) for name in _FIELDS}, **{name: getattr(self, name) for name in _OF_ROW}}


_OF_ROW = tuple(it.name for it in fields(Row))[1:]


class Use:
    """How much of a machine was in use, in each minute of the last hour."""

    def __init__(self) -> None:
        self._last = 0  # the newest minute
        self._known: dict[str, tuple[array[float], array[float]]] = {}  # name → means, and their weights, in a ring

    def add(self, minute: int, values: Mapping[str, float], weight: float) -> None:
        """Values that were measured in a minute: shares of what there is."""
        for passed in range(max(self._last + 1, minute - POINTS + 1), minute + 1):
            for _, weights in self._known.values():
                weights[passed % POINTS] = 0.0
        self._last = max(self._last, minute)
        if minute <= self._last - POINTS:
            return
        at = minute % POINTS
        for name, value in values.items():
            means, weights = self._known.setdefault(name, (array("f", [0.0] * POINTS), array("f", [0.0] * POINTS)))
            weights[at] += weight
            means[at] += (value - means[at]) * weight / weights[at]

    def fill(self, other: Use) -> None:
        """Take minutes of which nothing is known from another one."""
        for name, (means, weights) in other._known.items():
            own = self._known.get(name)
            for minute in range(other._last - POINTS + 1, other._last + 1):
                at = minute % POINTS
                if weights[at] and (own is None or not own[1][at]):
                    self.add(minute, {name: means[at]}, weights[at])

    def curves(self, now: float) -> dict[str, Curve]:
        """Name → a point for each minute, the last of which is this one; names of which nothing is known are absent."""
        last = int(now // STEP)
        found = {
            name: [self._at(name, minute) for minute in range(last - POINTS + 1, last + 1)] for name in self._known
        }
        return {name: curve for name, curve in sorted(found.items()) if any(it is not None for it in curve)}

    def _at(self, name: str, minute: int) -> float | None:
        means, weights = self._known[name]
        is_known = self._last - POINTS < minute <= self._last and weights[minute % POINTS]
        return round(means[minute % POINTS], 2) if is_known else None


@dataclass
class _Seen:
    """A machine as its target has shown it last."""

    row: Row
    when: float | None  # it answered; None if it never has
    use: Use = field(default_factory=Use)


@dataclass
class _Target:
    seen: dict[str, _Seen] = field(default_factory=dict)
    noted: float = -math.inf  # when its machines were measured last
    asked: float = -math.inf  # when somebody began to ask for its machines


class Machines:
    """What is known of the machines of all targets since the server has started."""

    def __init__(self) -> None:
        self._targets: dict[str, _Target] = {}
        self._here = machine_id()
        self._began = time.time()

    def is_due(self, target: str, now: float, seconds: float) -> bool:
        """Whether nobody has asked for the machines of a target for so long; now somebody has."""
        known = self._targets.setdefault(target, _Target())
        if now - known.asked < seconds:
            return False
        known.asked = now
        return True

    def take(
        self, target: str, there: Backend, nodes: Sequence[Node], jobs: Sequence[Job], now: float, *, fills: bool
    ) -> list[Row]:
        """The rows of what a target has answered. `fills`: also read what jobs have recorded of the last hour."""
        known = self._targets.setdefault(target, _Target())
        has_gap, before = now - known.noted > _SURE, known.seen
        known.asked, seen = now, dict[str, _Seen]()
        holders = _holders(nodes, jobs)
        for node in nodes:
            old = before.get(node.name)
            if node.state == SILENT:
                seen[node.name] = self._silent(old, self._row(target, node, []))
                continue
            use = old.use if old else Use()
            seen[node.name] = _Seen(self._row(target, node, holders.get(node.name, [])), now, use)
            if values := _values(node):
                use.add(int(now // STEP), values, 1.0)
        if fills and has_gap:
            for name, use in of_histories(_recorded(there, jobs, now), nodes).items():
                seen[name].use.fill(use)
        if fills or not has_gap:
            known.noted = now
        known.seen = seen
        return [it.row for it in seen.values()]

    def lost(self, target: str, named: Sequence[Node]) -> list[Row]:
        """The rows of a target that does not answer: what is known of it, or else the names of its machines."""
        known = self._targets.setdefault(target, _Target())
        known.seen = {
            **{node.name: self._silent(None, self._row(target, node, [])) for node in named},
            **{name: self._silent(it, it.row) for name, it in known.seen.items()},
        }
        return [it.row for it in known.seen.values()]

    def curves(self, target: str, names: Iterable[str], now: float) -> dict[str, dict[str, Curve]]:
        """Node → what was in use; those of which nothing is known are left out."""
        seen = self._targets.setdefault(target, _Target()).seen
        found = {name: seen[name].use.curves(now) for name in names if name in seen}
        return {name: curves for name, curves in found.items() if curves}

    def devices(self, jobs: Iterable[Job]) -> tuple[int, str] | None:
        """How many devices there are where these jobs run, and what they are; None if that is not known of each."""
        targets = {job.backend for job in jobs if job.devices or job.allocated}
        if not targets or not all(self._targets.get(name, _Target()).seen for name in targets):
            return None
        nodes = {
            it.row.key: it.row.node for name in targets for it in self._targets[name].seen.values() if not it.row.silent
        }.values()
        of = [node for node in nodes if node.device_count]
        kind = "slots" if of and all(node.slots for node in of) else "devices"
        return sum(node.device_count for node in of), kind

    def _row(self, target: str, node: Node, holders: list[Holder]) -> Row:
        is_plain = not node.partitions and not node.roles
        is_this = node.machine == self._here or (not node.machine and is_plain and is_here(node.name))
        key = "here" if is_this else node.machine or f"{target}/{node.name}"
        return Row(node, key, is_this, holders)

    def _silent(self, old: _Seen | None, row: Row) -> _Seen:
        """A machine that does not answer now, of which something may be known."""
        asked = show_time(self._began)
        if old is None:
            return _Seen(replace(row, silent={"since": None, "asked": asked}), None)
        node = replace(old.row.node, state=SILENT, load=0.0, memory_used=0, measured=False, gpus=())
        silent: Silence = {"since": show_time(old.when), "asked": asked}
        return _Seen(replace(old.row, node=node, silent=silent), old.when, old.use)


def _holders(nodes: Sequence[Node], jobs: Sequence[Job]) -> dict[str, list[Holder]]:
    """Node → the jobs that have devices there, or run there: since when, by whom, and until when at the latest."""
    going = {job.name: job for job in jobs if not job.is_over}
    on_hosts: dict[str, Counter[str]] = {}
    for job in going.values():
        for instance in job.instances if job.state in _AT_WORK else ():
            on_hosts.setdefault(instance.node.partition(".")[0], Counter())[job.name] += 1
    found: dict[str, list[Holder]] = {}
    for node in nodes:
        devices: dict[str, list[str]] = {}
        for device, those in node.allocated.items():
            for name in those:
                devices.setdefault(name, []).append(device)
        ranks = next((on_hosts[host] for host in _hosts_of(node) if host in on_hosts), Counter[str]())
        names = dict.fromkeys((*node.jobs, *ranks))
        found[node.name] = [
            _holder(name, going.get(name), devices.get(name, []), node.jobs.get(name, 0), ranks[name])
            for name in list(names)[:_MOST_HOLDERS]
        ]
    return found


def _hosts_of(node: Node) -> tuple[str, ...]:
    """What ranks may call the machine that they are on: its own host name, which its identity has, or this name."""
    own = node.machine.split(" ")[1:2]
    return tuple(name.partition(".")[0] for name in (*own, node.name))


def _holder(name: str, job: Job | None, devices: list[str], count: int, ranks: int) -> Holder:
    limit = job.started + job.time_limit if job and job.started and job.time_limit else None
    return {
        "name": name, "target": job.backend if job else None, "user": job.user if job else None,
        "since": show_time(job.started) if job and job.started else None,
        "until": show_time(limit) if limit else None,
        "devices": sorted(devices, key=lambda it: (len(it), it)), "count": count, "ranks": ranks,
    }  # fmt: skip


def _values(node: Node) -> dict[str, float]:
    """What of a machine is in use now, as shares."""
    use = [gpu["use"] for gpu in node.gpus if gpu["use"] is not None]
    found = {"gpu": sum(use) / len(use) / 100} if use else {}
    if node.measured and node.cores:
        found["cpu"] = min(1.0, node.load / node.cores)
    if node.measured and node.memory:
        found["memory"] = min(1.0, node.memory_used / node.memory)
    return found


# -- what jobs that ran on them have recorded --------------------------------------------------------------------------


def _recorded(there: Backend, jobs: Sequence[Job], now: float) -> list[NodeHistory]:
    begin = now - POINTS * STEP
    recent = [job for job in jobs if job.state == "RUNNING" or (job.finished or 0.0) > begin]
    recent.sort(key=lambda job: job.state != "RUNNING")
    found: list[NodeHistory] = []
    if isinstance(there, Recorded):
        for job in recent[:_MOST_JOBS]:
            with contextlib.suppress(UserError):  # the page says already what does not answer
                found += there.history(job.name, begin).nodes
    return found


def of_histories(found: Iterable[NodeHistory], nodes: Sequence[Node]) -> dict[str, Use]:
    """Node → its use. Jobs that saw only a part of a machine, such as their control group, are left out."""
    by_name = {node.name: node for node in nodes}
    shown: dict[str, Use] = {}
    for history in found:
        node = by_name.get(history["host"])
        for line in history["telemetry"] if node is not None else ():
            machine = line["machine"]
            if node is None or (machine.get("cores"), machine.get("memory")) != (node.cores, node.memory):
                continue
            seen = {"cpu": (machine.get("load"), node.cores), "memory": (machine.get("memory_used"), node.memory)}
            values = {name: part / of for name, (part, of) in seen.items() if part is not None and of}
            use = [it for it in line["gpus"]["use"] if it is not None] if "gpus" in line else []
            if use and len(use) == len(node.gpus):  # the job has all of them
                values["gpu"] = sum(use) / len(use) / 100
            begin, end = line["time"] - line["seconds"], line["time"]
            for minute in range(int(begin // STEP), int(end // STEP) + 1):
                part = min(end, (minute + 1) * STEP) - max(begin, minute * STEP)
                if part > 0:
                    shown.setdefault(node.name, Use()).add(minute, values, part)
    return shown
