"""What a machine has, and what of it is in use: cores, memory, disks, limits, read from the kernel's files.

Every function takes the files and folders that it reads as arguments, so that a test can pass others.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract.memory import CGROUP, PROC, limits_of_cgroups, machine_memory, number_of, read
from paceline.node.readers import Begun

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.contract.records import Capacity

SYS = Path("/sys")
_TICKS: int = os.sysconf("SC_CLK_TCK")
_BYTES = 8 << 20  # of the file that is read to measure a disk
_PIECE = 1 << 20


@dataclass(frozen=True)
class Cores:
    """Cores of the machine, those that this process may run on, and how many of them its cgroup lets it keep busy."""

    present: int
    usable: int
    quota: float | None = None


@dataclass(frozen=True)
class Space:
    """A folder's file system; sizes in bytes."""

    path: str  # the folder
    exists: bool  # whether it exists; if not, the other fields describe the nearest folder above it that does
    writable: bool  # whether this user may write to it, or make it
    total: int
    free: int
    free_files: int | None = None  # number of files that can still be made; None if the file system does not limit it


@dataclass(frozen=True)
class Limits:
    """What this user's processes may have; None is no limit."""

    open_files: int | None
    open_files_most: int | None
    processes: int | None
    core_dumps: bool


def cores(proc: Path = PROC, cgroup: Path = CGROUP) -> Cores:
    """The cores, and the cgroup's quota of them."""
    quotas = list(cpu_quotas(limits_of_cgroups("cpu", ("cpu.max", "cpu.cfs_quota_us"), proc, cgroup)))
    present = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else present
    return Cores(present, usable, min(quotas, default=None))


def cpu_quotas(found: Iterable[tuple[Path, str]]) -> Iterable[float]:
    """The CPU quotas, in cores, in these files of `limits_of_cgroups`; files without a limit are left out."""
    for path, text in found:
        fields = text.split()
        if path.name == "cpu.cfs_quota_us":
            fields.append(read(path.with_name("cpu.cfs_period_us")))
        if len(fields) == 2 and all(re.fullmatch(r"0*[1-9][0-9]{0,17}", field) for field in fields):
            yield int(fields[0]) / int(fields[1])


def space(path: Path) -> Space | None:
    """The space for files below a folder that may not exist yet; None if its disk does not answer."""
    path = path.absolute()
    there = next((folder for folder in (path, *path.parents) if os.path.lexists(folder)), Path("/"))
    try:
        at = os.statvfs(there)
    except OSError:
        return None
    return Space(
        path=str(path),
        exists=there == path,
        writable=there.is_dir() and os.access(there, os.W_OK | os.X_OK),
        total=at.f_blocks * at.f_frsize,
        free=at.f_bavail * at.f_frsize,
        free_files=at.f_favail if at.f_files else None,
    )


def busy_seconds(proc: Path = PROC, cgroup: Path = CGROUP) -> float:
    """Processor time spent since some moment: by the control group that has a quota, else on the cores we may use."""
    limited = [
        (quota, path)
        for path, text in limits_of_cgroups("cpu", ("cpu.max", "cpu.cfs_quota_us"), proc, cgroup)
        for quota in cpu_quotas([(path, text)])
    ]
    if limited:
        folder = min(limited, key=lambda pair: pair[0])[1].parent
        spent = re.search(r"^usage_usec ([0-9]+)$", read(folder / "cpu.stat"), re.MULTILINE)
        if spent:
            return int(spent[1]) / 1e6
        nanoseconds = read(folder / "cpuacct.usage")
        if nanoseconds.isdecimal():
            return int(nanoseconds) / 1e9
    usable = os.sched_getaffinity(0)
    ticks = 0
    for line in read(proc / "stat").splitlines():
        found = re.match(r"cpu([0-9]+)((?: +[0-9]+)+)", line)
        if found and int(found[1]) in usable:
            fields = [int(field) for field in found[2].split()]
            ticks += sum(fields[:3]) + sum(fields[5:7])  # user, nice, system; interrupts
    return ticks / _TICKS


def capacity(folder: Path, proc: Path = PROC, cgroup: Path = CGROUP) -> Capacity:
    """What the machine or its control group has, and what is in use of memory and of the disk of `folder`."""
    has, ram, disk = cores(proc, cgroup), machine_memory(proc, cgroup), space(folder)
    total = ram.total if ram.limit is None else ram.limit
    return {
        "cores": float(has.usable if has.quota is None else min(has.usable, has.quota)),
        "memory": total,
        "memory_used": max(0, total - ram.available),
        "disk": disk.total if disk else 0,
        "disk_used": disk.total - disk.free if disk else 0,
    }


def limits(proc: Path = PROC, cgroup: Path = CGROUP) -> Limits:
    """The limits of this process, which its children inherit, and its cgroups' on the number of processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes = [_none_if_infinite(resource.getrlimit(resource.RLIMIT_NPROC)[0])]
    processes += [number_of(text) for _, text in limits_of_cgroups("pids", ("pids.max",), proc, cgroup)]
    return Limits(
        open_files=_none_if_infinite(soft),
        open_files_most=_none_if_infinite(hard),
        processes=min((number for number in processes if number is not None), default=None),
        core_dumps=resource.getrlimit(resource.RLIMIT_CORE)[0] != 0,
    )


def _none_if_infinite(number: int) -> int | None:
    return None if number == resource.RLIM_INFINITY else number


def read_rate(folder: str | None = None, seconds: float = 1.0) -> float | None:
    """Bytes per second that reading a file in `folder` gives, without the page cache; None if `seconds` are too few.

    By default it is that for temporary files. The file has 8 MiB, and no name. A disk that hangs is not waited for.
    """
    import tempfile  # few jobs need it

    def measure() -> float:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(_BYTES // _PIECE):
                file.write(bytes(_PIECE))
            file.flush()
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            begun = time.monotonic()
            file.seek(0)
            while file.read(_PIECE):
                pass
            return _BYTES / max(time.monotonic() - begun, 1e-6)

    with contextlib.suppress(OSError):  # a full disk, or none; or TimeoutError
        return Begun(measure).result(seconds)
    return None
