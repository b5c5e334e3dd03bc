"""The GPUs of a machine, as nvidia-smi and the kernel's files describe them.

Every function takes the files, folders, variables and commands that it reads, so that a test can pass others.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from paceline.contract.memory import PROC, read

from .hardware import SYS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from paceline.contract.facts import GpuFacts, GpusFacts
    from paceline.contract.records import GpuRecord

VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_NVIDIA_VENDOR = "0x10de"

# What nvidia-smi is asked for: what the GPUs are, how they are used, and by which processes.
MODEL_FIELDS = ("index", "name", "memory.total", "memory.used", "driver_version")
USE_FIELDS = (
    "index", "uuid", "name", "utilization.gpu", "memory.total", "memory.used", "temperature.gpu", "power.draw",
)  # fmt: skip
_PROCESS_FIELDS = ("gpu_uuid", "pid")


def _query(what: str, fields: tuple[str, ...]) -> tuple[str, ...]:
    return "nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"


NVIDIA_SMI_MODEL = _query("gpu", MODEL_FIELDS)
NVIDIA_SMI_USE = _query("gpu", USE_FIELDS)
NVIDIA_SMI_PROCESSES = _query("compute-apps", _PROCESS_FIELDS)


@dataclass(frozen=True)
class Gpu:
    """A GPU; None is what is not known, or was not asked for."""

    index: int  # its number, as the driver counts
    uuid: str = ""  # its permanent name
    name: str = ""  # its model
    use: float | None = None  # percentage of time in which it was busy
    memory: int | None = None  # its memory in bytes
    memory_used: int | None = None  # how much of it is in use, in bytes
    temperature: float | None = None  # in degrees Celsius
    power: float | None = None  # in watts
    processes: tuple[int, ...] = ()  # on it, as the driver numbers them: it may be another pid namespace than ours

    def record(self) -> GpuRecord:
        """The GPU without its processes."""
        return cast("GpuRecord", {name: value for name, value in asdict(self).items() if name != "processes"})

    def is_called(self, device: str) -> bool:
        """Whether an entry of a visibility variable means this GPU: its number, or the beginning of its UUID."""
        return device == str(self.index) or (device.startswith("GPU-") and self.uuid.startswith(device))


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a machine."""

    nvidia: tuple[Gpu, ...] = ()  # NVIDIA GPUs that the driver knows
    amd: tuple[Gpu, ...] = ()  # AMD GPUs that the driver knows
    driver: str | None = None  # version of NVIDIA's driver, None when none is loaded
    nvidia_on_bus: int = 0  # how many NVIDIA GPUs the PCI bus has, with a driver or not
    visible: Mapping[str, str] | None = None  # the variables that are set and hide devices from a process
    problem: str | None = None  # why nvidia-smi is installed but has not answered

    def to_dict(self) -> GpusFacts:
        """The keys that `paceline check -o json` promises."""

        def model(gpu: Gpu) -> GpuFacts:
            return {"index": gpu.index, "name": gpu.name, "memory": gpu.memory, "used": gpu.memory_used}

        return {
            "nvidia": tuple(map(model, self.nvidia)), "amd": tuple(map(model, self.amd)), "driver": self.driver,
            "nvidia_on_bus": self.nvidia_on_bus, "visible": self.visible, "problem": self.problem,
        }  # fmt: skip


def installed(
    env: Mapping[str, str], proc: Path = PROC, sys: Path = SYS, command: tuple[str, ...] = NVIDIA_SMI_MODEL
) -> Gpus:
    """The GPUs of this machine: from nvidia-smi if there is one, else from the kernel."""
    text, problem = ask(command) if shutil.which(command[0]) else ("", None)
    nvidia, driver = parse_nvidia_smi(text, MODEL_FIELDS)
    return Gpus(
        nvidia=nvidia or nvidia_of_kernel(proc / "driver" / "nvidia"),
        amd=amd_of_kernel(sys / "class" / "kfd" / "kfd" / "topology" / "nodes"),
        driver=driver or _first_version(read(proc / "driver" / "nvidia" / "version")),
        nvidia_on_bus=nvidia_on_bus(sys / "bus" / "pci" / "devices"),
        visible={name: env[name] for name in VISIBILITY if name in env},
        problem=problem,
    )


def in_use(gpus: tuple[str, ...] = NVIDIA_SMI_USE) -> tuple[Gpu, ...]:
    """The GPUs with their use and their processes, from nvidia-smi; none if there is no nvidia-smi."""
    found, _ = parse_nvidia_smi(ask(gpus)[0], USE_FIELDS)
    return with_processes(found, ask(NVIDIA_SMI_PROCESSES)[0]) if found else ()


def ask(command: tuple[str, ...], seconds: float = 1.5) -> tuple[str, str | None]:
    """The output of a command, and why there is none.

    A command that hangs in the kernel cannot be killed, so it is not waited for after its time is over.
    """
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        return "", f"cannot be started: {error.strerror}"
    try:
        out = process.communicate(timeout=seconds)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        process.kill()
        process.stdout.close()  # type: ignore[union-attr]  # it is a pipe
        return "", f"gave no answer within {seconds:g} s"
    if process.returncode:
        lines = out.strip().splitlines()
        return "", lines[0].strip() if lines else f"ended with exit code {process.returncode}"
    return out, None


def parse_nvidia_smi(text: str, fields: tuple[str, ...]) -> tuple[tuple[Gpu, ...], str | None]:
    """The GPUs and the driver's version in an answer with these fields; lines that are no such row are left out."""
    rows = [row for row in _rows(text, fields) if re.fullmatch(r"[0-9]{1,6}", row["index"])]
    drivers = [_first_version(row.get("driver_version", "")) for row in rows]
    return tuple(map(_gpu, rows)), next((driver for driver in reversed(drivers) if driver), None)


def with_processes(gpus: tuple[Gpu, ...], text: str) -> tuple[Gpu, ...]:
    """The same GPUs with the processes in the answer to `NVIDIA_SMI_PROCESSES`."""
    by_gpu: dict[str, list[int]] = {}
    for row in _rows(text, _PROCESS_FIELDS):
        if re.fullmatch(r"[0-9]{1,12}", row["pid"]):
            by_gpu.setdefault(row["gpu_uuid"], []).append(int(row["pid"]))
    return tuple(replace(gpu, processes=tuple(by_gpu.get(gpu.uuid, ()))) for gpu in gpus)


def _rows(text: str, fields: tuple[str, ...]) -> Iterable[dict[str, str]]:
    for row in csv.reader(text.replace("\0", "").splitlines(), skipinitialspace=True):
        if len(row) == len(fields):
            yield {name: value.strip() for name, value in zip(fields, row)}


def _gpu(row: Mapping[str, str]) -> Gpu:
    return Gpu(
        index=int(row["index"]),
        uuid=row.get("uuid", ""),
        name=row["name"],
        use=_number(row, "utilization.gpu"),
        memory=_mebibytes(row, "memory.total"),
        memory_used=_mebibytes(row, "memory.used"),
        temperature=_number(row, "temperature.gpu"),
        power=_number(row, "power.draw"),
    )


def _number(row: Mapping[str, str], field: str) -> float | None:
    text = row.get(field, "")
    return float(text) if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,6})?", text) else None  # else [N/A], [Not Supported]


def _mebibytes(row: Mapping[str, str], field: str) -> int | None:
    number = _number(row, field)
    return None if number is None else int(number) << 20


def _first_version(text: str) -> str | None:
    found = re.search(r"(?<![\w.])\d+(?:\.\d+)+(?![\w.])", text)
    return found.group() if found else None


def nvidia_of_kernel(root: Path) -> tuple[Gpu, ...]:
    """The GPUs that NVIDIA's driver shows in /proc, without their memory."""
    texts = [read(folder / "information") for folder in _folders(root / "gpus")]
    names = [re.search(r"^Model:\s*(.+)$", text, re.MULTILINE) for text in texts]
    return tuple(Gpu(index, name=name.group(1).strip() if name else "NVIDIA GPU") for index, name in enumerate(names))


def amd_of_kernel(nodes: Path) -> tuple[Gpu, ...]:
    """The GPUs that AMD's driver shows in /sys, in its order."""
    gpus: list[Gpu] = []
    for node in sorted(_folders(nodes), key=lambda folder: (len(folder.name), folder.name)):
        if read(node / "gpu_id") in ("", "0"):
            continue  # a processor, or a GPU that this container may not use
        banks = [read(bank / "properties") for bank in _folders(node / "mem_banks")]
        sizes = [int(size) for bank in banks for size in re.findall(r"^size_in_bytes ([0-9]+)$", bank, re.MULTILINE)]
        gpus.append(Gpu(len(gpus), name=read(node / "name") or "AMD GPU", memory=sum(sizes) or None))
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
