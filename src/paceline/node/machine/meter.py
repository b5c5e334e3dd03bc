"""What jobs and this machine use now: cores, memory, GPUs.

One reading of /proc serves all jobs, whatever their number: each process's stat is read once.
"""

from __future__ import annotations

import csv
import os
import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import hardware

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

INTERVAL = 0.5  # seconds that figures are of, at least
MEMORY_SECONDS = 0.5  # of a reading, at most, go to telling shared memory apart
_TICKS: int = os.sysconf("SC_CLK_TCK")
_PAGE: int = os.sysconf("SC_PAGE_SIZE")
_GPU_FILES = ("/dev/nvidia", "/dev/dxg")
_NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=index,uuid,name,utilization.gpu,memory.total,memory.used,temperature.gpu,power.draw",
    "--format=csv,noheader,nounits",
)
_NVIDIA_SMI_PROCESSES = (
    "nvidia-smi",
    "--query-compute-apps=gpu_uuid,pid,used_memory",
    "--format=csv,noheader,nounits",
)


@dataclass(frozen=True)
class GpuProcess:
    """A process on a GPU: its bytes there, and the percentage of time in which it kept the GPU busy."""

    pid: int
    memory: int | None = None
    use: float | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU now; None is what nobody told.

    Attributes:
        index: its number, the driver's.
        uuid: its name for good.
        name: its model.
        use: percentage of time in which it was busy.
        memory: in all, in bytes.
        memory_used: of it.
        temperature: in degrees Celsius.
        power: in watts.
        processes: which the driver knows, numbered as it does: perhaps as those of another pid namespace.
    """

    index: int
    uuid: str = ""
    name: str = ""
    use: float | None = None
    memory: int | None = None
    memory_used: int | None = None
    temperature: float | None = None
    power: float | None = None
    processes: tuple[GpuProcess, ...] = ()

    def is_called(self, device: str) -> bool:
        """Whether a visibility variable's entry means this GPU: its number, or the beginning of its UUID."""
        return device == str(self.index) or (device.startswith("GPU-") and self.uuid.startswith(device))


@dataclass(frozen=True)
class JobUse:
    """What a job uses on this machine.

    Attributes:
        processes: how many it has.
        cpu: cores that they kept busy.
        memory: bytes; what several of them share counts once, as far as the kernel tells.
        gpus: `{"device", "use", "memory"}` of each GPU that it has: percentage of time and bytes, None if unknown.
    """

    processes: int
    cpu: float
    memory: int
    gpus: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class MachineUse:
    """What is in use on this machine, or of what its control group allows; sizes in bytes.

    Attributes:
        cores: that may be busy.
        load: that were.
        disk: of the file system of the folder asked for.
    """

    cores: float
    load: float
    memory: int
    memory_used: int
    disk: int
    disk_used: int
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True)
class Process:
    """A line of /proc/<pid>/stat.

    Attributes:
        parent: its parent's pid.
        start_time: in clock ticks since boot.
        own: processor time of its own, in clock ticks.
        reaped: the same of the children that it waited for.
        resident: bytes in memory, also those that others share.
        is_zombie: whether it has ended, and its parent does not know yet.
    """

    pid: int
    parent: int
    start_time: int
    own: int
    reaped: int
    resident: int
    is_zombie: bool


@dataclass(frozen=True)
class Snapshot:
    """All processes at one moment, and the processor time that this machine has spent, in seconds."""

    time: float
    processes: Mapping[int, Process]
    children: Mapping[int, Sequence[int]]
    busy: float

    def tree(self, pid: int, start_time: int | None) -> dict[int, Process]:
        """A process and all its descendants, none if it is gone; zombies are among them, for the time they took."""
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
    """Look at every process once."""
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
    """Processor time between two pictures of one tree, in seconds; of processes that came and went meanwhile too.

    Those are in the time of the children that a living process has waited for, together with what the ones that were
    there before had spent by then.
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


class Meter:
    """Tells what is in use, over the time since it was asked before."""

    def __init__(
        self,
        gpus: Callable[[], tuple[Gpu, ...]],
        proc: Path = hardware.PROC,
        cgroup: Path = hardware.CGROUP,
    ) -> None:
        """Look for the first time.

        Args:
            gpus: asks the driver.
        """
        self._gpus, self._proc, self._cgroup = gpus, proc, cgroup
        self._before = self._after = snapshot(proc, cgroup)
        self._shares: dict[tuple[int, int], tuple[float, int]] = {}  # process → when it was read, bytes of its own
        self._seen: tuple[Gpu, ...] = ()

    def read(self) -> None:
        """Look again, and at the GPUs; waits where the last look was less than `INTERVAL` ago."""
        self._before = self._after
        self._seen = self._gpus()
        time.sleep(max(0.0, self._before.time + INTERVAL - time.monotonic()))
        self._after = snapshot(self._proc, self._cgroup)
        living = {(p.pid, p.start_time) for p in self._after.processes.values()}
        self._shares = {key: value for key, value in self._shares.items() if key in living}

    @property
    def _seconds(self) -> float:
        return max(self._after.time - self._before.time, 1e-9)

    def machine(self, folder: Path) -> MachineUse:
        """What is in use on the machine, and of the disk of `folder`, at the last look."""
        cores, memory, space = (
            hardware.cores(self._proc, self._cgroup),
            hardware.memory(self._proc, self._cgroup),
            hardware.space(folder),
        )
        most = cores.usable if cores.quota is None else min(cores.usable, cores.quota)
        total = memory.total if memory.limit is None else memory.limit
        return MachineUse(
            cores=float(most),
            load=max(0.0, self._after.busy - self._before.busy) / self._seconds,
            memory=total,
            memory_used=max(0, total - memory.available),
            disk=space.total if space else 0,
            disk_used=space.total - space.free if space else 0,
            gpus=self._seen,
        )

    def jobs(
        self, agents: Mapping[str, tuple[int, int | None]], alone: Mapping[str, Sequence[str]]
    ) -> dict[str, JobUse]:
        """What jobs used at the last look; those whose agent is gone are left out.

        Args:
            agents: job → pid and start time of its agent, from which all its processes descend.
            alone: job → devices that no other job has: what is in use there is the job's, also if the driver counts
                processes in another way than we do.
        """
        trees = {job: tree for job, agent in agents.items() if (tree := self._after.tree(*agent))}
        living = {job: [p for p in tree.values() if not p.is_zombie] for job, tree in trees.items()}
        memory = self._memory([process for processes in living.values() for process in processes])
        return {
            job: JobUse(
                processes=len(living[job]),
                cpu=spent(self._before.tree(*agents[job]), tree) / self._seconds,
                memory=sum(memory[process.pid] for process in living[job]),
                gpus=tuple(self._gpus_of(tree, alone.get(job, ()))),
            )
            for job, tree in trees.items()
        }

    def _memory(self, processes: Sequence[Process]) -> dict[int, int]:
        """Bytes of processes, of what some share a part each.

        The kernel takes long to tell the parts: the longest unread come first, and those that there is no time for
        keep what they had, or count in full.
        """
        enough = time.monotonic() + MEMORY_SECONDS
        for process in sorted(processes, key=lambda p: self._shares.get((p.pid, p.start_time), (0.0, 0))[0]):
            if time.monotonic() > enough:
                break
            text = hardware.read(self._proc / str(process.pid) / "smaps_rollup")
            found = re.search(r"^Pss:\s+([0-9]+) kB$", text, re.MULTILINE)
            if found:  # else it is another user's, or just gone
                self._shares[process.pid, process.start_time] = time.monotonic(), int(found[1]) << 10
        return {p.pid: self._shares.get((p.pid, p.start_time), (0.0, p.resident))[1] for p in processes}

    def _gpus_of(self, tree: Mapping[int, Process], alone: Sequence[str]) -> Iterable[dict[str, Any]]:
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
        """Whether a process has opened a GPU: the driver may number processes as another pid namespace does."""
        folder = self._proc / str(pid) / "fd"
        try:
            return any(os.readlink(folder / entry).startswith(_GPU_FILES) for entry in os.listdir(folder))
        except OSError:
            return False


def gpus_of_nvidia_smi(
    gpus: tuple[str, ...] = _NVIDIA_SMI, processes: tuple[str, ...] = _NVIDIA_SMI_PROCESSES
) -> tuple[Gpu, ...]:
    """The GPUs as nvidia-smi tells them, none where there is no nvidia-smi."""
    found = parse_gpus(hardware.ask(gpus)[0])
    return with_processes(found, hardware.ask(processes)[0]) if found else ()


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """The GPUs in nvidia-smi's answer; lines that are none of its rows are left out."""
    gpus = []
    for fields in _rows(text):
        if len(fields) == 8 and re.fullmatch(r"[0-9]{1,6}", fields[0]):
            use, memory, memory_used, temperature, power = map(_number, fields[3:])
            gpus.append(
                Gpu(int(fields[0]), fields[1], fields[2], use, _bytes(memory), _bytes(memory_used), temperature, power)
            )
    return tuple(gpus)


def with_processes(gpus: tuple[Gpu, ...], text: str) -> tuple[Gpu, ...]:
    """The same GPUs with the processes in nvidia-smi's answer."""
    by_gpu: dict[str, list[GpuProcess]] = {}
    for fields in _rows(text):
        if len(fields) == 3 and re.fullmatch(r"[0-9]{1,12}", fields[1]):
            by_gpu.setdefault(fields[0], []).append(GpuProcess(int(fields[1]), _bytes(_number(fields[2]))))
    return tuple(replace(gpu, processes=tuple(by_gpu.get(gpu.uuid, ()))) for gpu in gpus)


def _rows(text: str) -> Iterable[list[str]]:
    for row in csv.reader(text.replace("\0", "").splitlines(), skipinitialspace=True):
        yield [field.strip() for field in row]


def _number(field: str) -> float | None:
    return float(field) if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,6})?", field) else None  # else [N/A], [Not Supported]


def _bytes(mebibytes: float | None) -> int | None:
    return None if mebibytes is None else int(mebibytes) << 20
