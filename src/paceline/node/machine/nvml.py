"""NVIDIA's GPUs from NVML, the library of the driver, or from nvidia-smi if it cannot be loaded.

Source of functions, structures and numbers: https://docs.nvidia.com/deploy/nvml-api (nvml.h).
"""

from __future__ import annotations

import ctypes
import functools
import shutil
from typing import Any

from .gpus import Gpu, in_use

_LETTERS = 96  # of a name, or of a UUID
_MOST_PROCESSES = 1024  # on a GPU


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _ProcessBefore(ctypes.Structure):  # of drivers before 510
    _fields_ = (("pid", ctypes.c_uint), ("memory", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (*_ProcessBefore._fields_, ("gpu_instance", ctypes.c_uint), ("compute_instance", ctypes.c_uint))


class Nvml:
    """The library. Each method returns None if the GPU or its driver does not support the query."""

    def __init__(self, library: Any) -> None:
        """Initialize it."""
        self._library = library
        if not self._call("nvmlInit_v2"):
            raise OSError("NVML cannot be initialized")

    def _call(self, name: str, *arguments: Any) -> bool:
        function = getattr(self._library, name, None)  # an older driver may lack it
        return function is not None and function(*arguments) == 0

    def _number(self, name: str, *arguments: Any) -> int | None:
        number = ctypes.c_uint()
        return number.value if self._call(name, *arguments, ctypes.byref(number)) else None

    def _text(self, name: str, device: Any) -> str:
        text = ctypes.create_string_buffer(_LETTERS)
        return text.value.decode(errors="replace") if self._call(name, device, text, _LETTERS) else ""

    def count(self) -> int:
        """How many GPUs there are."""
        return self._number("nvmlDeviceGetCount_v2") or 0

    def device(self, index: int) -> Any:
        """A GPU, for the other methods; None if it has fallen off the bus."""
        device = ctypes.c_void_p()
        return device if self._call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(device)) else None

    def uuid(self, device: Any) -> str:
        """Its permanent name; "" if it is unknown."""
        return self._text("nvmlDeviceGetUUID", device)

    def name(self, device: Any) -> str:
        """Its model; "" if it is unknown."""
        return self._text("nvmlDeviceGetName", device)

    def use(self, device: Any) -> int | None:
        """Percentage of time in which it was busy."""
        rates = _Rates()
        return int(rates.gpu) if self._call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(rates)) else None

    def memory(self, device: Any) -> tuple[int, int] | None:
        """Its bytes, and those that are used."""
        memory = _Memory()
        is_known = self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        return (int(memory.total), int(memory.used)) if is_known else None

    def temperature(self, device: Any) -> int | None:
        """Degrees Celsius."""
        return self._number("nvmlDeviceGetTemperature", device, 0)

    def power(self, device: Any) -> int | None:
        """Milliwatts."""
        return self._number("nvmlDeviceGetPowerUsage", device)

    def processes(self, device: Any) -> list[int]:
        """The pids of those on it."""
        for name, kind in (
            ("nvmlDeviceGetComputeRunningProcesses_v3", _Process),
            ("nvmlDeviceGetComputeRunningProcesses", _ProcessBefore),
        ):
            count, found = ctypes.c_uint(_MOST_PROCESSES), (kind * _MOST_PROCESSES)()
            if self._call(name, device, ctypes.byref(count), found):
                return [process.pid for process in found[: count.value]]
        return []


@functools.lru_cache(maxsize=1)
def library() -> Nvml | None:
    """NVML; None on a machine without it."""
    try:
        return Nvml(ctypes.CDLL("libnvidia-ml.so.1"))
    except OSError:
        return None


def gpus() -> tuple[Gpu, ...]:
    """The GPUs with their use and their processes; none on a machine without NVIDIA's driver."""
    nvml = library()
    if nvml is not None:
        return tuple(_gpu(nvml, index) for index in range(nvml.count()))
    return in_use() if shutil.which("nvidia-smi") else ()


def _gpu(nvml: Nvml, index: int) -> Gpu:
    device = nvml.device(index)
    if device is None:
        return Gpu(index)
    use, memory, temperature, power = (
        nvml.use(device), nvml.memory(device), nvml.temperature(device), nvml.power(device),
    )  # fmt: skip
    return Gpu(
        index=index,
        uuid=nvml.uuid(device),
        name=nvml.name(device),
        use=None if use is None else float(use),
        memory=None if memory is None else memory[0],
        memory_used=None if memory is None else memory[1],
        temperature=None if temperature is None else float(temperature),
        power=None if power is None else power / 1000,
        processes=tuple(nvml.processes(device)),
    )
