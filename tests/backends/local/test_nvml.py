"""GPUs as NVIDIA's library tells them: with a stand-in for it, and with a real GPU where there is one."""

from __future__ import annotations

import inspect
import os
import sys
import types
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from paceline.backends.local import nvml
from paceline.node.machine.devices import accelerators
from paceline.node.machine.gpus import Gpu, GpuProcess, in_use
from paceline.node.machine.meter import Meter
from paceline.node.machine.processes import start_time

if TYPE_CHECKING:
    from collections.abc import Callable


class NVMLError(Exception):
    """What every function of NVML raises."""


class FakeNvml(types.ModuleType):
    """As much of the module `pynvml` as is used."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.cannot: set[str] = set()
        self.processes = [SimpleNamespace(pid=11, usedGpuMemory=300), SimpleNamespace(pid=12, usedGpuMemory=None)]
        self.samples = [
            SimpleNamespace(pid=11, timeStamp=2, smUtil=40),
            SimpleNamespace(pid=11, timeStamp=1, smUtil=90),
        ]

    def __getattribute__(self, name: str) -> Any:
        if name in object.__getattribute__(self, "__dict__").get("cannot", ()):

            def refuse(*_: object) -> None:
                raise NVMLError(name)

            return refuse
        return super().__getattribute__(name)

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"handle {index}"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return "GPU-1"

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(gpu=93, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: object = None) -> SimpleNamespace:
        return SimpleNamespace(total=1000, used=400, free=600)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 402_130

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 51

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return self.processes

    def nvmlDeviceGetProcessUtilization(self, handle: str, timeStamp: int) -> list[SimpleNamespace]:
        assert timeStamp > 1e15, "microseconds since 1970"
        return self.samples


@pytest.fixture
def pynvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_everything(pynvml: FakeNvml) -> None:
    assert nvml.reader()() == (
        Gpu(0, "GPU-1", "NVIDIA H200", 93.0, 1000, 400, 51, 402.13,
            (GpuProcess(11, 300, 40.0), GpuProcess(12, None, 0.0))),
    )  # fmt: skip


QUESTIONS = [name for name in vars(FakeNvml) if name.startswith("nvmlDevice")]


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_driver_may_not_know(pynvml: FakeNvml, question: str) -> None:
    """Old drivers, virtual GPUs and those cut into instances do not answer everything."""
    pynvml.cannot = {question}
    gpus = nvml.reader()()
    assert gpus == () if question == "nvmlDeviceGetCount" else len(gpus) == 1
    if question == "nvmlDeviceGetProcessUtilization":
        assert gpus[0].processes == (GpuProcess(11, 300, None), GpuProcess(12, None, None))


def test_without_a_driver_nvidia_smi_is_asked(pynvml: FakeNvml) -> None:
    pynvml.cannot = {"nvmlInit"}
    assert nvml.reader() is in_use


def test_without_the_package_nvidia_smi_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.reader() is in_use


@pytest.mark.parametrize("question", ["nvmlInit", *QUESTIONS])
def test_the_stand_in_is_as_the_real_one(question: str) -> None:
    real: Callable[..., Any] = getattr(pytest.importorskip("pynvml"), question)
    stand_in = getattr(FakeNvml(), question)
    assert list(inspect.signature(real).parameters) == list(inspect.signature(stand_in).parameters)


@pytest.mark.gpu
@pytest.mark.torch
@pytest.mark.skipif(not accelerators(), reason="this machine has no GPU")
@pytest.mark.parametrize("source", ["nvml", "nvidia-smi"])
def test_a_real_gpu(source: str) -> None:
    torch = pytest.importorskip("torch")
    if source == "nvml":
        pytest.importorskip("pynvml")
    gpus = nvml.reader() if source == "nvml" else in_use
    held = torch.zeros(1 << 28, device="cuda")  # 1 GiB
    name = next(iter(accelerators()))
    seen = next(gpu for gpu in gpus() if gpu.is_called(name))
    assert (seen.memory or 0) > (seen.memory_used or 0) >= held.nbytes
    assert seen.uuid.startswith("GPU-")
    meter = Meter(gpus)
    meter.read()
    (use,) = meter.jobs({"me": (os.getpid(), start_time(os.getpid()))}, {"me": [name]}).values()
    (mine,) = [gpu for gpu in use["gpus"] if gpu["device"] == name]
    assert mine["memory"] >= held.nbytes
