"""What a job and its ranks use on a node, measured from one call to the next."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from paceline.contract.memory import PROC, read
from paceline.node.machine import hardware, processes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from paceline.contract.records import GpusUse, MachineUse, RanksUse, Telemetry
    from paceline.contract.stands import Spent
    from paceline.node.machine.gpus import Gpu

NET, INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")
_REST = ("evaluation", "logging", "script", "idle", "other")  # what the library does not measure
SHARES = ("data", "compute", "exchange", "checkpoint", *_REST)
_AT_WORK = 0.05  # of a core, that a rank uses at least which is not idle
_PAGE: int = os.sysconf("SC_PAGE_SIZE")
_LANES = 4  # InfiniBand counts bytes of each lane, of which ports are said to have four
_VIRTUAL = ("br-", "cali", "cni", "docker", "flannel", "veth", "virbr")  # interfaces whose bytes others count too
# The share that a part of a step belongs to: as `watching/spent.py` names them, and as the library does.
_OF_SAMPLES = {
    "workers": "data", "loading": "data", "forward": "compute", "backward": "compute", "optimizer": "compute",
    "item": "compute", "copy": "compute", "exchange": "exchange", "checkpoint": "checkpoint", "restore": "checkpoint",
    "evaluation": "evaluation", "logging": "logging", "script": "script", "idle": "idle",
}  # fmt: skip
_OF_TIMES = {
    "data": "data", "forward_backward": "compute", "optimizer": "compute", "sync": "exchange",
    "checkpoint": "checkpoint",
}  # fmt: skip


@dataclass(frozen=True)
class RankNow:
    """A rank at one moment."""

    rank: int  # of the job
    pid: int  # of its process
    device: str = ""  # its accelerator, as the machine numbers it; "" for none
    # how often it was seen in each part of a step; see `watching/spent.py`
    parts: Mapping[str, float] = field(default_factory=dict)
    # seconds of each part of its steps, and how many `steps`, as the library has measured them
    times: Mapping[str, float] = field(default_factory=dict)


class _Used(NamedTuple):
    """What a process and its descendants have used so far: seconds of a core, bytes; and their memory now."""

    cpu: float = 0.0
    read: int = 0
    written: int = 0
    memory: int = 0


class _Moment(NamedTuple):
    """All that is counted, at one moment."""

    time: float  # on `time.monotonic`'s clock
    busy: float  # seconds that the machine's cores have worked
    seen: processes.Snapshot
    job: _Used
    living: int  # processes of the job
    ranks: dict[int, tuple[RankNow, _Used]]
    network: tuple[int, int]


class Sampler:
    """Measures a job on this node."""

    def __init__(self, folder: Path, gpus: Callable[[], tuple[Gpu, ...]]) -> None:
        """Measure nothing yet."""
        self._folder, self._gpus = folder, gpus
        self._before: _Moment | None = None

    def take(self, agent: int, ranks: Iterable[RankNow]) -> tuple[Telemetry | None, tuple[Gpu, ...]]:
        """What was used since the last call, and the GPUs of the ranks; no telemetry at the first call."""
        before, now = self._before, self._look(agent, ranks)
        self._before = now
        mine = _of_job(self._gpus(), now)
        seconds = 0.0 if before is None else now.time - before.time
        if before is None or seconds <= 0:
            return None, mine
        cpu, read, written, memory = _rates(before.job, now.job, seconds)
        line: Telemetry = {
            "time": round(time.time(), 3),
            "seconds": round(seconds, 3),
            "job": {"processes": now.living, "cpu": cpu, "memory": memory, "read": read, "written": written},
            "machine": self._machine(before, now, seconds),
            "ranks": _ranks(before, now, seconds, uses_gpu=any(gpu.use for gpu in mine)),
        }
        if mine:
            line["gpus"] = _columns(mine)
        return line, mine

    def _look(self, agent: int, ranks: Iterable[RankNow]) -> _Moment:
        now, seen = time.monotonic(), processes.Snapshot()
        tree = seen.tree(agent)
        used = {pid: self._used(process) for pid, process in tree.items()}
        found = {it.rank: (it, _sum(used[pid] for pid in seen.tree(it.pid) if pid in used)) for it in ranks}
        living = sum(process.state != "Z" for process in tree.values())
        return _Moment(now, hardware.busy_seconds(), seen, _sum(used.values()), living, found, traffic())

    def _used(self, process: processes.Process) -> _Used:
        """What one process has used, and the children that it has reaped."""
        folder, read, written, shared = f"/proc/{process.pid}", 0, 0, 0
        try:
            with open(f"{folder}/statm", "rb") as file:
                shared = int(file.read().split()[2]) * _PAGE
            with open(f"{folder}/io", "rb") as file:
                counters = dict(line.split(b": ") for line in file.read().splitlines())
            read, written = int(counters[b"read_bytes"]), int(counters[b"write_bytes"])
        except (OSError, ValueError, KeyError, IndexError):  # it is gone, or may not be read
            pass
        return _Used(process.cpu + process.reaped, read, written, max(0, process.resident - shared))

    def _machine(self, before: _Moment, now: _Moment, seconds: float) -> MachineUse:
        received, sent = (
            round(max(0, after - earlier) / seconds) for earlier, after in zip(before.network, now.network)
        )
        return {
            **hardware.capacity(self._folder),
            "load": round(max(0.0, now.busy - before.busy) / seconds, 3),
            "received": received,
            "sent": sent,
        }


def _sum(many: Iterable[_Used]) -> _Used:
    return _Used(*map(sum, zip(_Used(), *many)))


def _rates(before: _Used, now: _Used, seconds: float) -> tuple[float, float, float, int]:
    """Cores, bytes read and written per second, and bytes of memory.

    What a process has used stays counted in its parent when that has reaped it.
    """
    cpu, read, written = (max(0.0, after - earlier) / seconds for earlier, after in zip(before[:3], now[:3]))
    return round(cpu, 3), round(read), round(written), now.memory


def _ranks(before: _Moment, now: _Moment, seconds: float, *, uses_gpu: bool) -> RanksUse:
    found: dict[str, list[Any]] = {key: [] for key in ("rank", "cpu", "read", "written", "memory", *SHARES, "steps")}
    for number, (rank, used) in sorted(now.ranks.items()):
        then, earlier = before.ranks.get(number, (None, _Used()))
        is_same = then is not None and then.pid == rank.pid
        figures: Sequence[Any] = _rates(earlier, used, seconds) if is_same else (None, None, None, used.memory)
        shares = _shares(then if then is not None and is_same else RankNow(number, rank.pid), rank, figures[0] or 0.0)
        if (
            shares[0] is None and is_same and figures[0] < _AT_WORK and not uses_gpu
        ):  # it is not sampled while all stand
            shares = [float(share == "idle") for share in SHARES]
        steps = _more(then.times if then is not None and is_same else {}, rank.times).get("steps")
        values = [number, *figures, *shares, round(steps / seconds, 3) if steps is not None else None]
        for column, value in zip(found.values(), values):
            column.append(value)
    return {key: column for key, column in found.items() if any(it is not None for it in column)}  # type: ignore[return-value]


def _shares(before: RankNow, now: RankNow, cores: float) -> list[float | None]:
    """Shares of the time: what the library has measured counts for more than samples.

    `cores` is how many the rank has kept busy: while others of its threads or processes compute, it is not idle.
    """
    seen = _by_share(_more(before.parts, now.parts), _OF_SAMPLES)
    total = sum(seen.values())
    idle = min(seen.get("idle", 0.0), max(0.0, 1.0 - cores) * total)
    seen["script"] = seen.get("script", 0.0) + seen.get("idle", 0.0) - idle
    seen["idle"] = idle
    times = _more(before.times, now.times)
    if not times.get("total"):
        return [round(seen.get(share, 0.0) / total, 3) if total else None for share in SHARES]
    found = _by_share(times, _OF_TIMES)
    rest = max(0.0, times["total"] - sum(found.values()))
    seen = {share: seen[share] for share in _REST if seen.get(share)} or {"other": 1.0}
    found.update((share, rest * count / sum(seen.values())) for share, count in seen.items())
    return [round(found.get(share, 0.0) / times["total"], 3) for share in SHARES]


def _by_share(parts: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part, value in parts.items():
        share = names.get(part, "other" if names is _OF_SAMPLES else "")
        if share:
            found[share] = found.get(share, 0.0) + value
    return found


def _more(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    return {key: max(0.0, value - before.get(key, 0.0)) for key, value in now.items()}


# -- GPUs --------------------------------------------------------------------------------------------------------------


def _of_job(gpus: tuple[Gpu, ...], now: _Moment) -> tuple[Gpu, ...]:
    """Those that the ranks have been given; without names of devices, those on which their processes are."""
    devices = {rank.device for rank, _ in now.ranks.values() if rank.device}
    if devices:
        return tuple(gpu for gpu in gpus if any(map(gpu.is_called, devices)))
    pids = {pid for rank, _ in now.ranks.values() for pid in now.seen.tree(rank.pid)}
    mine = tuple(gpu for gpu in gpus if any(pid in pids for pid in gpu.processes))
    is_numbered_elsewhere = not any(pid in now.seen.processes for gpu in gpus for pid in gpu.processes)
    # In a container, whose processes the driver numbers as the machine does, all GPUs are the container's.
    return gpus if not mine and is_numbered_elsewhere and any(gpu.processes for gpu in gpus) else mine


def _columns(gpus: Sequence[Gpu]) -> GpusUse:
    return {
        "index": [gpu.index for gpu in gpus],
        "use": [gpu.use for gpu in gpus],
        "memory": [gpu.memory for gpu in gpus],
        "memory_used": [gpu.memory_used for gpu in gpus],
        "temperature": [gpu.temperature for gpu in gpus],
        "power": [gpu.power for gpu in gpus],
    }


# -- the network -------------------------------------------------------------------------------------------------------


def traffic(proc: Path = PROC, net: Path = NET, infiniband: Path = INFINIBAND) -> tuple[int, int]:
    """Bytes that this machine, or its network namespace, has received and sent, InfiniBand's among them."""
    found: dict[str, tuple[int, int]] = {}
    for line in read(proc / "self" / "net" / "dev").splitlines():
        name, colon, rest = line.partition(":")
        fields = rest.split()
        if colon and len(fields) > 8 and (name := name.strip()) != "lo":
            found[name] = int(fields[0]), int(fields[8])
    real = [name for name in found if (net / name / "device").exists()]
    chosen = real or [name for name in found if not name.startswith(_VIRTUAL)]
    received, sent = (sum(found[name][side] for name in chosen) for side in (0, 1))
    more = over_infiniband(infiniband) or (0, 0)
    return received + more[0], sent + more[1]


def over_infiniband(infiniband: Path = INFINIBAND) -> tuple[int, int] | None:
    """Bytes that came and went over InfiniBand; None without such a device."""
    ports = list(infiniband.glob("*/ports/*/counters"))
    words = [[read(counters / f"port_{name}_data") for counters in ports] for name in ("rcv", "xmit")]
    received, sent = (sum(int(word) * _LANES for word in of_side if word.isdecimal()) for of_side in words)
    return (received, sent) if ports else None


# -- what else the machine does: its network, swapping, and cores that heat slows down ---------------------------------

_SWAPPED = re.compile(r"^pswp(?:in|out) (\d+)$", re.MULTILINE)
_STALLED = re.compile(r"^some .*total=(\d+)$", re.MULTILINE)
_BITS = 125_000  # bytes of a Mbit


class _Counters(NamedTuple):
    """What the kernel counts: bytes, bytes, bytes, microseconds, times. None is what it does not."""

    sent: int
    over_infiniband: int | None
    swapped: int
    stalled: int | None
    slowed: int


class HostUse:
    """Compares the counters of this machine with those at the beginning."""

    def __init__(self, proc: Path = PROC, sys: Path = hardware.SYS) -> None:
        """Begin."""
        self._proc, self._sys = proc, sys
        self._began, self._first = time.monotonic(), self._look()

    def known(self, now: float | None = None) -> Spent:
        """What has happened since; `now` is a time of `time.monotonic`."""
        seconds, before, after = (now or time.monotonic()) - self._began, self._first, self._look()
        if seconds <= 0:
            return {}
        found: Spent = {
            "sent": (after.sent - before.sent) / seconds,
            "swapped": (after.swapped - before.swapped) * _PAGE / seconds,
            "slowed": after.slowed - before.slowed,
        }
        if before.over_infiniband is not None and after.over_infiniband is not None:
            found["infiniband"] = (after.over_infiniband - before.over_infiniband) / seconds
        if before.stalled is not None and after.stalled is not None:
            found["stalled"] = round((after.stalled - before.stalled) / 1e6 / seconds, 3)
        if link := self._link():
            found["link"] = link
        return found

    def _look(self) -> _Counters:
        net, infiniband = self._sys / "class" / "net", self._sys / "class" / "infiniband"
        bands = over_infiniband(infiniband)
        stalled = _STALLED.search(read(self._proc / "pressure" / "memory"))
        heat = (self._sys / "devices" / "system" / "cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_count")
        return _Counters(
            traffic(self._proc, net, infiniband)[1],
            None if bands is None else bands[1],
            sum(map(int, _SWAPPED.findall(read(self._proc / "vmstat")))),
            int(stalled[1]) if stalled else None,
            sum(int(count) for count in map(read, heat) if count.isdecimal()),
        )

    def _link(self) -> float:
        """Bytes per second of the fastest interface with a device; 0 if that is not known."""
        speeds = (read(it.parent / "speed") for it in (self._sys / "class" / "net").glob("*/device"))
        return max((int(speed) * _BITS for speed in speeds if speed.isdecimal()), default=0)
