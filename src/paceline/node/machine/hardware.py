"""What a machine has: devices, cores, memory, disks, limits, read from the kernel's files and nvidia-smi.

Every function takes the files, folders and variables that it reads, so that a test can hand it others.
"""

from __future__ import annotations

import csv
import os
import re
import resource
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PROC, SYS = Path("/proc"), Path("/sys")
CGROUP = SYS / "fs" / "cgroup"
VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=index,name,memory.total,memory.used,driver_version",
    "--format=csv,noheader,nounits",
)
_NO_LIMIT = 2**60  # cgroup v1 writes "no limit" as a number near 2**63
_NVIDIA_VENDOR = "0x10de"


@dataclass(frozen=True)
class Gpu:
    """One GPU; sizes are in bytes, and None is what nobody told."""

    index: int
    name: str
    memory: int | None = None
    used: int | None = None


@dataclass(frozen=True)
class Devices:
    """The GPUs of a machine.

    Attributes:
        nvidia: NVIDIA GPUs that the driver knows.
        amd: AMD GPUs that the driver knows.
        driver: version of NVIDIA's driver, None when none is loaded.
        nvidia_on_bus: how many NVIDIA GPUs the PCI bus has, with a driver or not.
        visible: the variables in force that hide devices from a process.
        problem: why nvidia-smi, though installed, gave no answer.
    """

    nvidia: tuple[Gpu, ...] = ()
    amd: tuple[Gpu, ...] = ()
    driver: str | None = None
    nvidia_on_bus: int = 0
    visible: Mapping[str, str] | None = None
    problem: str | None = None


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
    """A folder's file system; sizes in bytes.

    Attributes:
        path: the folder.
        exists: whether it is there yet; when it is not, the rest is of the nearest folder above that is.
        writable: whether this user may write to it, or make it.
        free_files: how many more files fit, None when the file system does not count them.
    """

    path: str
    exists: bool
    writable: bool
    total: int
    free: int
    free_files: int | None = None


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


def devices(
    env: Mapping[str, str], proc: Path = PROC, sys: Path = SYS, command: tuple[str, ...] = NVIDIA_SMI
) -> Devices:
    """The GPUs, asked of nvidia-smi when it is there, else of the kernel."""
    text, problem = ask(command) if shutil.which(command[0]) else ("", None)
    nvidia, driver = parse_nvidia_smi(text)
    return Devices(
        nvidia=nvidia or nvidia_of_kernel(proc / "driver" / "nvidia"),
        amd=amd_of_kernel(sys / "class" / "kfd" / "kfd" / "topology" / "nodes"),
        driver=driver or _first_version(read(proc / "driver" / "nvidia" / "version")),
        nvidia_on_bus=nvidia_on_bus(sys / "bus" / "pci" / "devices"),
        visible={name: env[name] for name in VISIBILITY if name in env},
        problem=problem,
    )


def ask(command: tuple[str, ...], seconds: float = 1.5) -> tuple[str, str | None]:
    """What a command prints, and why it printed nothing.

    A command that hangs in the kernel cannot be killed, so nobody waits for it after its time.
    """
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        return "", f"cannot be started: {error.strerror}"
    try:
        out = process.communicate(timeout=seconds)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        process.kill()
        return "", f"gave no answer within {seconds:g} s"
    if process.returncode:
        lines = out.strip().splitlines()
        return "", lines[0].strip() if lines else f"ended with exit code {process.returncode}"
    return out, None


def parse_nvidia_smi(text: str) -> tuple[tuple[Gpu, ...], str | None]:
    """The GPUs and the driver's version in the answer to `NVIDIA_SMI`; lines that are none of its rows are left out."""
    gpus, driver = [], None
    for row in csv.reader(text.replace("\0", "").splitlines(), skipinitialspace=True):
        fields = [field.strip() for field in row]
        if len(fields) == 5 and re.fullmatch(r"[0-9]{1,6}", fields[0]):
            gpus.append(Gpu(int(fields[0]), fields[1], _mebibytes(fields[2]), _mebibytes(fields[3])))
            driver = _first_version(fields[4]) or driver
    return tuple(gpus), driver


def _mebibytes(field: str) -> int | None:
    return int(field) << 20 if re.fullmatch(r"[0-9]{1,12}", field) else None  # else [N/A], [Not Supported], …


def _first_version(text: str) -> str | None:
    found = re.search(r"(?<![\w.])\d+(?:\.\d+)+(?![\w.])", text)
    return found.group() if found else None


def nvidia_of_kernel(root: Path) -> tuple[Gpu, ...]:
    """The GPUs that NVIDIA's driver shows in /proc, without their memory."""
    texts = [read(folder / "information") for folder in _folders(root / "gpus")]
    names = [re.search(r"^Model:\s*(.+)$", text, re.MULTILINE) for text in texts]
    return tuple(Gpu(index, name.group(1).strip() if name else "NVIDIA GPU") for index, name in enumerate(names))


def amd_of_kernel(nodes: Path) -> tuple[Gpu, ...]:
    """The GPUs that AMD's driver shows in /sys, in its order."""
    gpus: list[Gpu] = []
    for node in sorted(_folders(nodes), key=lambda folder: (len(folder.name), folder.name)):
        if read(node / "gpu_id") in ("", "0"):
            continue  # a processor, or a GPU that this container may not use
        banks = [read(bank / "properties") for bank in _folders(node / "mem_banks")]
        sizes = [int(size) for bank in banks for size in re.findall(r"^size_in_bytes ([0-9]+)$", bank, re.MULTILINE)]
        gpus.append(Gpu(len(gpus), read(node / "name") or "AMD GPU", sum(sizes) or None))
    return tuple(gpus)


def nvidia_on_bus(pci: Path) -> int:
    """How many display controllers of NVIDIA the PCI bus has."""
    return sum(
        read(device / "vendor") == _NVIDIA_VENDOR and read(device / "class").startswith("0x03")
        for device in _folders(pci)
    )


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def cores(proc: Path = PROC, cgroup: Path = CGROUP) -> Cores:
    """The cores, and the cgroup's quota of them."""
    quotas = list(cpu_quotas(limits_of_cgroups("cpu", ("cpu.max", "cpu.cfs_quota_us"), proc, cgroup)))
    present = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else present
    return Cores(present, usable, min(quotas, default=None))


def cpu_quotas(found: Iterable[tuple[Path, str]]) -> Iterable[float]:
    """How many cores these files of `limits_of_cgroups` let a process keep busy; those without a limit are left out."""
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
        used -= min(used, int(cached.group(1)) if cached else 0)  # what the kernel drops before it kills
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
    """How much fits below a folder that may not be there yet; None when its disk does not answer."""
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
