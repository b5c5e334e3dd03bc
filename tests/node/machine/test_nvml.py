"""GPUs as NVML tells them: with recorded answers of the library, and with a real GPU where there is one."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.node.machine import nvml
from paceline.node.machine.devices import accelerators
from paceline.node.machine.gpus import USE_FIELDS, Gpu, in_use, parse_nvidia_smi, with_processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOT_SUPPORTED, UNINITIALIZED, INSUFFICIENT_SIZE = 3, 1, 7


class Recorded:
    """The library as ctypes loads it: each function writes a recorded answer where its arguments point to."""

    def __init__(self, *cannot: str) -> None:
        self._cannot = cannot

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.endswith("_v3") and "v3" in self._cannot:
            raise AttributeError(name)
        if name in self._cannot:
            return lambda *_: NOT_SUPPORTED
        found: Callable[..., int] = getattr(self, f"answer_{name.partition('_')[0]}")
        return found

    def answer_nvmlInit(self) -> int:
        return 0

    def answer_nvmlDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 1
        return 0

    def answer_nvmlDeviceGetHandleByIndex(self, index: int, device: Any) -> int:
        device._obj.value = 0x7F0000 + index
        return 0

    def answer_nvmlDeviceGetUUID(self, device: Any, text: Any, size: int) -> int:
        text.value = b"GPU-9b1e5d2c-53d5-1d3a-7f0c-0f3bb3b6d1a4"[: size - 1]
        return 0

    def answer_nvmlDeviceGetName(self, device: Any, text: Any, size: int) -> int:
        text.value = b"NVIDIA H100 80GB HBM3"[: size - 1]
        return 0

    def answer_nvmlDeviceGetUtilizationRates(self, device: Any, rates: Any) -> int:
        rates._obj.gpu, rates._obj.memory = 93, 40
        return 0

    def answer_nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.free, memory._obj.used = 85520809984, 44718096384, 40802713600
        return 0

    def answer_nvmlDeviceGetPowerUsage(self, device: Any, power: Any) -> int:
        power._obj.value = 402_130
        return 0

    def answer_nvmlDeviceGetTemperature(self, device: Any, sensor: int, degrees: Any) -> int:
        degrees._obj.value = 51
        return 0

    def answer_nvmlDeviceGetComputeRunningProcesses(self, device: Any, count: Any, processes: Any) -> int:
        if count._obj.value < 2:
            return INSUFFICIENT_SIZE
        processes[0].pid, processes[1].pid = 11, 12
        count._obj.value = 2
        return 0


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Has the library answer as recorded, but for these functions."""

    def cdll(*cannot: str) -> None:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: Recorded(*cannot))
        nvml.library.cache_clear()

    yield cdll
    monkeypatch.undo()
    nvml.library.cache_clear()


@pytest.mark.parametrize("cannot", [(), ("v3",)], ids=["now", "drivers before 510"])
def test_everything(load: Callable[..., None], cannot: tuple[str, ...]) -> None:
    load(*cannot)
    assert nvml.gpus() == (
        Gpu(0, "GPU-9b1e5d2c-53d5-1d3a-7f0c-0f3bb3b6d1a4", "NVIDIA H100 80GB HBM3", 93.0, 85520809984, 40802713600,
            51.0, 402.13, (11, 12)),
    )  # fmt: skip


QUESTIONS = {
    "nvmlDeviceGetHandleByIndex_v2": "uuid", "nvmlDeviceGetUUID": "uuid", "nvmlDeviceGetName": "name",
    "nvmlDeviceGetUtilizationRates": "use", "nvmlDeviceGetMemoryInfo": "memory", "nvmlDeviceGetPowerUsage": "power",
    "nvmlDeviceGetTemperature": "temperature",
}  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_driver_may_not_know(load: Callable[..., None], question: str) -> None:
    """Old drivers, virtual GPUs and those cut into instances do not answer everything."""
    load(question)
    (gpu,) = nvml.gpus()
    assert getattr(gpu, QUESTIONS[question]) in (None, "")


def test_without_a_driver_nvidia_smi_is_asked(load: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    load("nvmlInit_v2")
    monkeypatch.setattr(nvml, "in_use", lambda: (Gpu(7),))
    monkeypatch.setattr(nvml.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert nvml.gpus() == (Gpu(7),)
    monkeypatch.setattr(nvml.shutil, "which", lambda name: None)
    assert nvml.gpus() == ()


@pytest.mark.gpu
@pytest.mark.torch
@pytest.mark.skipif(not accelerators(), reason="this machine has no GPU")
@pytest.mark.parametrize("gpus", [nvml.gpus, in_use], ids=["nvml", "nvidia-smi"])
def test_a_real_gpu(gpus: Callable[[], tuple[Gpu, ...]]) -> None:
    torch = pytest.importorskip("torch")
    held = torch.zeros(1 << 28, device="cuda")  # 1 GiB
    name = next(iter(accelerators()))
    seen = next(gpu for gpu in gpus() if gpu.is_called(name))
    assert (seen.memory or 0) > (seen.memory_used or 0) >= held.nbytes
    assert seen.uuid.startswith("GPU-")


@pytest.mark.gpu
@pytest.mark.skipif(not accelerators(), reason="this machine has no GPU")
def test_a_real_gpu_is_the_same_for_nvml_and_nvidia_smi() -> None:
    of_library, of_command = nvml.gpus(), in_use()
    assert [(gpu.index, gpu.uuid, gpu.name) for gpu in of_library] == [
        (gpu.index, gpu.uuid, gpu.name) for gpu in of_command
    ]
    for one, other in zip(of_library, of_command, strict=True):
        assert (one.memory is None) == (other.memory is None)
        assert abs((one.memory or 0) - (other.memory or 0)) < 1 << 20  # nvidia-smi rounds
        assert set(one.processes) >= set(other.processes)  # it leaves out those that it may not name


# -- nvidia-smi --------------------------------------------------------------------------------------------------------

SMI = """0, GPU-5a1, NVIDIA H200, 93, 143771, 1024, 51, 402.13
1, GPU-5a2, NVIDIA H200, [N/A], 143771, 1, [Not Supported], [N/A]
Failed to initialize NVML
"""


def test_nvidia_smi_is_read() -> None:
    found = "GPU-5a1, 4711\nGPU-5a1, 4712\n[Insufficient Permissions]\n"
    assert with_processes(parse_nvidia_smi(SMI, USE_FIELDS)[0], found) == (
        Gpu(0, "GPU-5a1", "NVIDIA H200", 93.0, 143771 << 20, 1 << 30, 51.0, 402.13, (4711, 4712)),
        Gpu(1, "GPU-5a2", "NVIDIA H200", None, 143771 << 20, 1 << 20, None, None),
    )


@given(st.text(), st.text())
def test_whatever_nvidia_smi_says(gpus: str, found: str) -> None:
    with_processes(parse_nvidia_smi(gpus, USE_FIELDS)[0], found)


def test_there_may_be_no_nvidia_smi() -> None:
    assert in_use(("no-such-program",)) == ()
