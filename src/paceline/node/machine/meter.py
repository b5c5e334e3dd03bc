"""What jobs and this machine use now: cores, memory, GPUs.

One reading of /proc serves all jobs: each process's stat is read once, however many jobs there are.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import hardware

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from paceline.contract.records import Capacity, GpuUseRecord, MachineUseRecord, UsageRecord

    from .gpus import Gpu

INTERVAL = 0.5  # seconds: the shortest time that figures are measured over
MEMORY_SECONDS = 0.5  # the longest time per reading to find out which memory is shared
_TICKS: int = os.sysconf("SC_CLK_TCK")
_PAGE: int = os.sysconf("SC_PAGE_SIZE")
_GPU_FILES = ("/dev/nvidia", "/dev/dxg")


@dataclass(frozen=True)
class Process:
    """A line of /proc/<pid>/stat."""

    pid: int
    parent: int  # its parent's pid
    start_time: int  # in clock ticks since boot
    own: int  # processor time of its own, in clock ticks
    reaped: int  # processor time of the children that it has reaped, in clock ticks
    resident: int  # bytes in memory, shared ones included
    is_zombie: bool  # whether it has ended and its parent has not reaped it


@dataclass(frozen=True)
class Snapshot:
    """All processes at one moment, and the processor time that this machine has spent, in seconds."""

    time: float
    processes: Mapping[int, Process]
    children: Mapping[int, Sequence[int]]
    busy: float

    def tree(self, pid: int, start_time: int | None) -> dict[int, Process]:
        """A process and all its descendants, zombies included (they took time); empty if the process is gone."""
        root = self.processes.get(pid)
        if root is None or root.start_time != start_time:
            return {}
        found, queue = {pid: root}, [pid]
        while queue:
            for child in self.children.get(queue.pop(), ()):
                if child not in found:
                    found[child] = self.processes[child]
                    queue.append(child)
        return found


def snapshot(proc: Path = hardware.PROC, cgroup: Path = hardware.CGROUP) -> Snapshot:
    """Read every process once."""
    found: dict[int, Process] = {}
    children: dict[int, list[int]] = {}
    now = time.monotonic()
    for entry in os.listdir(proc):
        if entry.isdigit() and (process := _process(proc, entry)) is not None:
            found[process.pid] = process
            children.setdefault(process.parent, []).append(process.pid)
    return Snapshot(now, found, children, busy_seconds(proc, cgroup))


def _process(proc: Path, pid: str) -> Process | None:
    try:
        descriptor = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(descriptor, 4096)
        finally:
            os.close(descriptor)
        fields = text[text.rindex(b")") + 2 :].split()
        return Process(
            pid=int(pid), parent=int(fields[1]), start_time=int(fields[19]), own=int(fields[11]) + int(fields[12]),
            reaped=int(fields[13]) + int(fields[14]), resident=int(fields[21]) * _PAGE, is_zombie=fields[0] == b"Z",
        )  # fmt: skip
    except (OSError, ValueError, IndexError):  # it is gone
        return None


def busy_seconds(proc: Path = hardware.PROC, cgroup: Path = hardware.CGROUP) -> float:
    """Processor time spent since some moment: by the control group that has a quota, else on the cores we may use."""
    limited = [
        (quota, path)
        for path, text in hardware.limits_of_cgroups("cpu", ("cpu.max", "cpu.cfs_quota_us"), proc, cgroup)
        for quota in hardware.cpu_quotas([(path, text)])
    ]
    if limited:
        folder = min(limited, key=lambda pair: pair[0])[1].parent
        spent = re.search(r"^usage_usec ([0-9]+)$", hardware.read(folder / "cpu.stat"), re.MULTILINE)
        if spent:
            return int(spent[1]) / 1e6
        nanoseconds = hardware.read(folder / "cpuacct.usage")
        if nanoseconds.isdecimal():
            return int(nanoseconds) / 1e9
    usable = os.sched_getaffinity(0)
    ticks = 0
    for line in hardware.read(proc / "stat").splitlines():
        found = re.match(r"cpu([0-9]+)((?: +[0-9]+)+)", line)
        if found and int(found[1]) in usable:
            fields = [int(field) for field in found[2].split()]
            ticks += sum(fields[:3]) + sum(fields[5:7])  # user, nice, system; interrupts
    return ticks / _TICKS


def spent(before: Mapping[int, Process], after: Mapping[int, Process]) -> float:
    """Processor time between two snapshots of one tree, in seconds, including processes that came and went meanwhile.

    A process that has ended counts in the `reaped` time of its parent, together with the time that it had spent before
    the first snapshot. That part is subtracted.
    """
    own = reaped = 0
    for pid, process in after.items():
        then = before.get(pid)
        if then is None or then.start_time != process.start_time:
            own += process.own
            reaped += process.reaped
        else:
            own += max(0, process.own - then.own)
            reaped += max(0, process.reaped - then.reaped)
    gone = [p for p in before.values() if p.pid not in after or after[p.pid].start_time != p.start_time]
    return (own + max(0, reaped - sum(p.own + p.reaped for p in gone))) / _TICKS


def capacity(folder: Path, proc: Path = hardware.PROC, cgroup: Path = hardware.CGROUP) -> Capacity:
    """What the machine or its control group has, and what is in use of memory and of the disk of `folder`."""
    cores, memory, space = hardware.cores(proc, cgroup), hardware.memory(proc, cgroup), hardware.space(folder)
    total = memory.total if memory.limit is None else memory.limit
    return {
        "cores": float(cores.usable if cores.quota is None else min(cores.usable, cores.quota)),
        "memory": total,
        "memory_used": max(0, total - memory.available),
        "disk": space.total if space else 0,
        "disk_used": space.total - space.free if space else 0,
    }


class Meter:
    """Measures what is in use, over the time between the last two readings."""

    def __init__(
        self,
        gpus: Callable[[], tuple[Gpu, ...]],
        proc: Path = hardware.PROC,
        cgroup: Path = hardware.CGROUP,
    ) -> None:
        """Take the first reading."""
        self._gpus, self._proc, self._cgroup = gpus, proc, cgroup
        self._before = self._after = snapshot(proc, cgroup)
        self._shares: dict[tuple[int, int], tuple[float, int]] = {}  # process → when it was read, bytes of its own
        self._seen: tuple[Gpu, ...] = ()

    def read(self) -> None:
        """Take another reading, of the GPUs as well; waits if the last one was less than `INTERVAL` ago."""
        self._before = self._after
        self._seen = self._gpus()
        time.sleep(max(0.0, self._before.time + INTERVAL - time.monotonic()))
        self._after = snapshot(self._proc, self._cgroup)
        living = {(p.pid, p.start_time) for p in self._after.processes.values()}
        self._shares = {key: value for key, value in self._shares.items() if key in living}

    @property
    def _seconds(self) -> float:
        return max(self._after.time - self._before.time, 1e-9)

    def machine(self, folder: Path) -> MachineUseRecord:
        """What is in use on the machine or in its control group, and on the disk of `folder`, at the last reading."""
        load = round(max(0.0, self._after.busy - self._before.busy) / self._seconds, 3)
        gpus = tuple(gpu.record() for gpu in self._seen)
        return {**capacity(folder, self._proc, self._cgroup), "load": load, "gpus": gpus}

    def jobs(
        self, agents: Mapping[str, tuple[int, int | None]], alone: Mapping[str, Sequence[str]]
    ) -> dict[str, UsageRecord]:
        """What jobs use, as of the last reading; those whose agent is gone are left out."""
        trees = {job: tree for job, agent in agents.items() if (tree := self._after.tree(*agent))}
        living = {job: [p for p in tree.values() if not p.is_zombie] for job, tree in trees.items()}
        memory = self._memory([process for processes in living.values() for process in processes])
        return {
            job: {
                "processes": len(living[job]),
                "cpu": round(spent(self._before.tree(*agents[job]), tree) / self._seconds, 3),
                "memory": sum(memory[process.pid] for process in living[job]),
                "gpus": tuple(self._gpus_of(tree, alone.get(job, ()))),
            }
            for job, tree in trees.items()
        }

    def _memory(self, processes: Sequence[Process]) -> dict[int, int]:
        """The bytes of each process; memory that several share is divided among them.

        The kernel takes long to compute these. Processes whose last figure is the oldest come first; the others keep
        theirs, or count with all shared memory, when the time is over.
        """
        enough = time.monotonic() + MEMORY_SECONDS
        for process in sorted(processes, key=lambda p: self._shares.get((p.pid, p.start_time), (0.0, 0))[0]):
            if time.monotonic() > enough:
                break
            text = hardware.read(self._proc / str(process.pid) / "smaps_rollup")
            found = re.search(r"^Pss:\s+([0-9]+) kB$", text, re.MULTILINE)
            if found:  # else the process is another user's, or gone
                self._shares[process.pid, process.start_time] = time.monotonic(), int(found[1]) << 10
        return {p.pid: self._shares.get((p.pid, p.start_time), (0.0, p.resident))[1] for p in processes}

    def _gpus_of(self, tree: Mapping[int, Process], alone: Sequence[str]) -> Iterable[GpuUseRecord]:
        for gpu in self._seen:
            device = next((name for name in alone if gpu.is_called(name)), None)
            mine = [p for p in gpu.processes if p.pid in tree and self._has_gpu(p.pid)]
            if mine:
                use: float | None = None
                if all(p.use is not None for p in mine):
                    use = min(100.0, sum(p.use or 0.0 for p in mine))
                elif len(mine) == len(gpu.processes):
                    use = gpu.use
                memory = None if any(p.memory is None for p in mine) else sum(p.memory or 0 for p in mine)
                if memory is None and device is not None:
                    memory = gpu.memory_used
                yield {"device": device or str(gpu.index), "use": use, "memory": memory}
            elif device is not None:
                yield {"device": device, "use": gpu.use, "memory": gpu.memory_used}

    def _has_gpu(self, pid: int) -> bool:
        """Whether a process has opened a GPU: a pid from the driver may be of another pid namespace."""
        folder = self._proc / str(pid) / "fd"
        try:
            return any(os.readlink(folder / entry).startswith(_GPU_FILES) for entry in os.listdir(folder))
        except OSError:
            return False
