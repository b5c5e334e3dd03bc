"""What a machine has, and what of it is in use: cores, memory, disks, limits, read from the kernel's files.

Every function takes the files and folders that it reads as arguments, so that a test can pass others.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.contract.records import Capacity

PROC, SYS = Path("/proc"), Path("/sys")
CGROUP = SYS / "fs" / "cgroup"
_TICKS: int = os.sysconf("SC_CLK_TCK")
_BYTES = 8 << 20  # of the file that is read to measure a disk
_PIECE = 1 << 20
_NO_LIMIT = 2**60  # cgroup v1 writes "no limit" as a number near 2**63


@dataclass(frozen=True)
class Cores:
    """Cores of the machine, those that this process may run on, and how many of them its cgroup lets it keep busy."""

    present: int
    usable: int
    quota: float | None = None


@dataclass(frozen=True)
class Memory:
    """Memory in bytes: of the machine, what could be used now, and what the cgroup allows (None: all of it)."""

    total: int
    available: int
    limit: int | None = None


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


def read(path: Path) -> str:
    """The text of a file of the kernel, empty when it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except (OSError, ValueError):  # ValueError: no file can have such a name
        return ""


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


def memory(proc: Path = PROC, cgroup: Path = CGROUP) -> Memory:
    """The memory, and the tightest of the cgroups' limits when it is below what the machine has."""
    lines = re.findall(r"^(\w+):\s+([0-9]+) kB$", read(proc / "meminfo"), re.MULTILINE)
    amounts = {name: int(kib) << 10 for name, kib in lines}
    total = amounts.get("MemTotal", 0)
    available = amounts.get("MemAvailable", amounts.get("MemFree", 0))
    limit: int | None = None
    for path, text in limits_of_cgroups("memory", ("memory.max", "memory.limit_in_bytes"), proc, cgroup):
        allowed = _count(text)
        if allowed is None or (total and allowed >= total):
            continue
        limit = allowed if limit is None else min(limit, allowed)
        used = _count(read(path.with_name("memory.current")) or read(path.with_name("memory.usage_in_bytes"))) or 0
        cached = re.search(r"^(?:total_)?inactive_file ([0-9]+)$", read(path.with_name("memory.stat")), re.MULTILINE)
        used -= min(used, int(cached.group(1)) if cached else 0)  # the kernel drops this before it kills a process
        available = min(available, max(0, allowed - used))
    return Memory(total, available, limit)


def _count(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,20}", text) and int(text) < _NO_LIMIT else None


def limits_of_cgroups(controller: str, files: tuple[str, ...], proc: Path, cgroup: Path) -> list[tuple[Path, str]]:
    """Every file with one of these names in the cgroups of this process and those above, with its text.

    A container often sees the names of its cgroups outside but only the folders inside; names that are not there are
    passed over, down to the root of the hierarchy, which then is the container's own cgroup.
    """
    found = {}
    for line in read(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number == "0" and not controllers:
            roots = [cgroup, cgroup / "unified"]
        elif controller in controllers.split(","):
            roots = [cgroup / controllers, cgroup / controller]
        else:
            continue
        inner = Path(*(part for part in Path(name).parts if part not in ("/", "..")))
        for folder in (root / part for root in roots for part in (inner, *inner.parents)):
            found.update({folder / file: text for file in files if (text := read(folder / file))})
    return list(found.items())


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
    has, ram, disk = cores(proc, cgroup), memory(proc, cgroup), space(folder)
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
    processes += [_count(text) for _, text in limits_of_cgroups("pids", ("pids.max",), proc, cgroup)]
    return Limits(
        open_files=_none_if_infinite(soft),
        open_files_most=_none_if_infinite(hard),
        processes=min((number for number in processes if number is not None), default=None),
        core_dumps=resource.getrlimit(resource.RLIMIT_CORE)[0] != 0,
    )


def _none_if_infinite(number: int) -> int | None:
    return None if number == resource.RLIM_INFINITY else number


def read_rate(folder: str, seconds: float = 1.0) -> float | None:
    """Bytes per second that reading a file in `folder` gives, without the page cache; None if `seconds` are too few.

    The file has 8 MiB, and no name. A disk that hangs is not waited for.
    """
    import tempfile  # few jobs need it

    found: list[float] = []

    def measure() -> None:
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:  # a full disk, or none
            for _ in range(_BYTES // _PIECE):
                file.write(bytes(_PIECE))
            file.flush()
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            begun = time.monotonic()
            file.seek(0)
            while file.read(_PIECE):
                pass
            found.append(_BYTES / max(time.monotonic() - begun, 1e-6))

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
