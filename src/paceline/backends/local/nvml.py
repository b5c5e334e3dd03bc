"""NVIDIA's GPUs as read from NVML, if `nvidia-ml-py` is installed (`paceline[gpu]`)."""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

from paceline.node.machine.gpus import Gpu, GpuProcess, in_use

if TYPE_CHECKING:
    from collections.abc import Callable

_RECENT = 2.0  # seconds that a process's use is of


def reader() -> Callable[[], tuple[Gpu, ...]]:
    """A function that reads the GPUs: from NVML, or from nvidia-smi if NVML cannot be used."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return in_use
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver, or one of another version
        return in_use
    return lambda: _gpus(nvml)


def _gpus(nvml: Any) -> tuple[Gpu, ...]:
    ask = _Ask(nvml)
    handles = [ask(nvml.nvmlDeviceGetHandleByIndex, index) for index in range(ask(nvml.nvmlDeviceGetCount) or 0)]
    return tuple(_gpu(nvml, ask, index, handle) for index, handle in enumerate(handles))


def _gpu(nvml: Any, ask: _Ask, index: int, handle: Any) -> Gpu:
    if handle is None:  # it has fallen off the bus
        return Gpu(index)
    rates = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
    memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    power = ask(nvml.nvmlDeviceGetPowerUsage, handle)
    return Gpu(
        index=index,
        uuid=_text(ask(nvml.nvmlDeviceGetUUID, handle)),
        name=_text(ask(nvml.nvmlDeviceGetName, handle)),
        use=None if rates is None else float(rates.gpu),
        memory=None if memory is None else int(memory.total),
        memory_used=None if memory is None else int(memory.used),
        temperature=ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        power=None if power is None else power / 1000,
        processes=_processes(nvml, ask, handle),
    )


def _processes(nvml: Any, ask: _Ask, handle: Any) -> tuple[GpuProcess, ...]:
    memory = {p.pid: p.usedGpuMemory for p in ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()}
    since = int((time.time() - _RECENT) * 1e6)
    samples = sorted(
        ask(nvml.nvmlDeviceGetProcessUtilization, handle, since) or (), key=lambda sample: int(sample.timeStamp)
    )
    use = {sample.pid: float(sample.smUtil) for sample in samples}  # of each process the last one
    return tuple(
        GpuProcess(pid, None if used is None else int(used), use.get(pid, 0.0 if samples else None))
        for pid, used in memory.items()
    )


class _Ask:
    """Calls NVML; the result is None if the GPU or its driver does not support the query."""

    def __init__(self, nvml: Any) -> None:
        self._error = nvml.NVMLError

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except self._error:
            return None


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""
