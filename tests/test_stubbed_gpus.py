"""GPUs end to end on a machine without one: a stub of the driver's library, and of nvidia-smi, answers from a file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import eventually, why_says

if TYPE_CHECKING:
    from tests.conftest import Paceline

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="this machine has no C compiler for the stub"),
    pytest.mark.skipif(
        any(map(os.path.exists, ("/proc/driver/nvidia", "/dev/nvidiactl"))),
        reason="this machine has a driver of its own, which is asked first",
    ),
]

# A line of the file is a GPU: UUID, name, use in %, MiB, used MiB, degrees, watts, pids. "-" is what the driver does
# not support, and a GPU whose use is "lost" has fallen off the bus. Numbers of errors: nvmlReturn_t in nvml.h.
LIBRARY = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, LIB_RM_VERSION_MISMATCH = 18, GPU_IS_LOST = 15 };
typedef unsigned long long u64;
static char line[1024], *field[8];

static FILE *opened(const char *suffix) {
    char path[4096];
    snprintf(path, sizeof path, "%s%s", getenv("STUB_GPUS"), suffix);
    return fopen(path, "r");
}
int nvmlInit_v2(void) {
    FILE *mismatch = opened(".mismatch");
    if (mismatch) fclose(mismatch);
    return mismatch ? LIB_RM_VERSION_MISMATCH : SUCCESS;
}
int nvmlDeviceGetCount_v2(unsigned *count) {
    FILE *file = opened("");
    for (*count = 0; fgets(line, sizeof line, file); ++*count);
    fclose(file);
    return SUCCESS;
}
static int look(void *device) {
    FILE *file = opened("");
    for (size_t number = 0; number < (size_t)device; number++) fgets(line, sizeof line, file);
    fclose(file);
    line[strcspn(line, "\n")] = 0;
    char *rest = line;
    for (int number = 0; number < 8; number++) field[number] = strsep(&rest, ",");
    return strcmp(field[2], "lost") ? SUCCESS : GPU_IS_LOST;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    unsigned count;
    nvmlDeviceGetCount_v2(&count);
    *device = (void *)(size_t)(index + 1);
    return index < count ? look(*device) : INVALID_ARGUMENT;
}
static int text(void *device, int number, char *to, unsigned size) {
    int error = look(device);
    if (!error) snprintf(to, size, "%s", field[number]);
    return error;
}
static int number(void *device, int number, double *to) {
    int error = look(device);
    if (!error && !strcmp(field[number], "-")) return NOT_SUPPORTED;
    if (!error) *to = atof(field[number]);
    return error;
}
int nvmlDeviceGetUUID(void *device, char *to, unsigned size) { return text(device, 0, to, size); }
int nvmlDeviceGetName(void *device, char *to, unsigned size) { return text(device, 1, to, size); }
int nvmlDeviceGetUtilizationRates(void *device, unsigned rates[2]) {
    double value = 0;
    int error = number(device, 2, &value);
    rates[0] = value;
    return error;
}
int nvmlDeviceGetMemoryInfo(void *device, u64 memory[3]) {
    double total = 0, used = 0;
    int error = number(device, 3, &total);
    if (!error) error = number(device, 4, &used);
    memory[0] = (u64)total << 20, memory[1] = (u64)(total - used) << 20, memory[2] = (u64)used << 20;
    return error;
}
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *to) {
    double value = 0;
    int error = number(device, 5, &value);
    *to = value;
    return error;
}
int nvmlDeviceGetPowerUsage(void *device, unsigned *to) {
    double value = 0;
    int error = number(device, 6, &value);
    *to = value * 1000;
    return error;
}
struct process { unsigned pid; u64 memory; unsigned gpu_instance, compute_instance; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *found) {
    int error = look(device);
    *count = 0;
    if (!error)
        for (char *pid = strtok(field[7], " "); pid; pid = strtok(NULL, " ")) found[(*count)++].pid = atoi(pid);
    return error;
}
"""
NVIDIA_SMI = r"""#!/bin/sh
if [ -e "$STUB_GPUS.mismatch" ]; then
    echo "Failed to initialize NVML: Driver/library version mismatch"
    exit 18
fi
if grep -q ,lost, "$STUB_GPUS"; then
    echo "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system"
    exit 15
fi
case "$1" in
--query-compute-apps=*)
    awk -F, '{ n = split($8, pids, " "); for (i = 1; i <= n; i++) print $1 ", " pids[i] }' "$STUB_GPUS" ;;
--query-gpu=*) awk -F, -v "fields=${1#*=}" '{
    value["index"] = NR - 1; value["uuid"] = $1; value["name"] = $2; value["utilization.gpu"] = $3
    value["memory.total"] = $4; value["memory.used"] = $5; value["temperature.gpu"] = $6; value["power.draw"] = $7
    value["driver_version"] = "570.86.15"
    n = split(fields, names, ","); row = ""
    for (i = 1; i <= n; i++) row = row (i > 1 ? ", " : "") (value[names[i]] == "-" ? "[N/A]" : value[names[i]])
    print row
}' "$STUB_GPUS" ;;
esac
"""
BUSY = ("GPU-aa01", "NVIDIA H200", "93", "143771", "1024", "51", "402.13", "")
OTHER = ("GPU-bb02", "NVIDIA H200", "7", "143771", "2048", "40", "90", "")
THIRD = ("GPU-cc03", "NVIDIA H200", "-", "143771", "512", "-", "-", "")  # as a virtual one
VISIBLE = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library and nvidia-smi."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "nvml.c").write_text("#define _GNU_SOURCE\n" + LIBRARY)
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-o", library, folder / "nvml.c"], check=True)
    (folder / "nvidia-smi").write_text(NVIDIA_SMI)
    (folder / "nvidia-smi").chmod(0o755)
    return folder


class Machine:
    """A machine with GPUs, which a test changes while jobs run."""

    def __init__(self, paceline: Paceline, driver: Path) -> None:
        self._file = paceline.folder / "gpus"
        self.has(BUSY, OTHER, THIRD)
        paceline.env.pop("CUDA_VISIBLE_DEVICES", None)
        paceline.env.update(
            STUB_GPUS=str(self._file),
            LD_LIBRARY_PATH=str(driver),
            PATH=f"{driver}:{paceline.env['PATH']}",
        )

    def has(self, *gpus: tuple[str, ...]) -> None:
        """It has these from now on."""
        new = self._file.with_suffix(".new")
        new.write_text("".join(",".join(gpu) + "\n" for gpu in gpus))
        new.replace(self._file)

    def gets_another_driver(self) -> None:
        """The driver's files are of another version than what runs in the kernel, as after an update."""
        self._file.with_suffix(".mismatch").touch()


@pytest.fixture
def machine(paceline: Paceline, driver: Path) -> Machine:
    """A machine with three GPUs, for `paceline`."""
    return Machine(paceline, driver)


def measured(paceline: Paceline, job: str) -> list[dict[str, Any]]:
    """The GPUs of each measurement of a job."""
    path = paceline.home / "jobs" / job / "telemetry.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line).get("gpus", {}) for line in lines]


def lines(text: str) -> list[str]:
    """What ranks have printed, without their names."""
    return sorted(line.rpartition("] ")[2] for line in text.splitlines())


def test_devices_are_found_and_granted(paceline: Paceline, machine: Machine) -> None:
    paceline.script(VISIBLE)
    assert lines(paceline.succeeds("run", "-n", "gpu", "--tee", "all", "script.py").stdout) == ["None"] * 3
    flags = ("--framework", "indexed", "--tee", "all")
    assert lines(paceline.succeeds("run", *flags, "-n", "4", "--gpus", "2", "script.py").stdout) == ["0", "0", "1", "1"]
    refused = paceline("run", "--gpus", "4", "script.py")
    assert (refused.returncode, "this machine has 3 (0, 1, 2)" in refused.stderr) == (2, True), refused.stderr
    machine.has(BUSY)
    assert lines(paceline.succeeds("run", *flags, "-n", "gpu", "script.py").stdout) == ["0"]


@pytest.mark.parametrize(
    ("visible", "seen"),
    [("GPU-bb02,GPU-cc03", ["GPU-bb02", "GPU-cc03"]), ("2, 0", ["0", "2"]), ("1,-1,0", ["1"]), ("-1", ["None"])],
)
def test_a_variable_chooses_devices(paceline: Paceline, machine: Machine, visible: str, seen: list[str]) -> None:
    """What comes after -1 does not count for CUDA either."""
    paceline.script(VISIBLE)
    paceline.env["CUDA_VISIBLE_DEVICES"] = visible
    flags = ("--framework", "indexed", "-n", str(len(seen)), "--tee", "all")
    found = lines(paceline.succeeds("run", *flags, "script.py").stdout)
    assert found == (seen if seen != ["None"] else ["-1"])


def test_numbers_are_those_of_the_driver(paceline: Paceline, machine: Machine) -> None:
    """CUDA's own begin with the fastest GPU; whoever has set variables of CUDA's has its numbers."""
    paceline.script("import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ.get('CUDA_DEVICE_ORDER'))")
    assert paceline.succeeds("run", "--devices", "1", "script.py").stdout == "1 PCI_BUS_ID\n"
    paceline.env["CUDA_DEVICE_ORDER"] = "FASTEST_FIRST"
    assert paceline.succeeds("run", "--devices", "1", "script.py").stdout == "1 FASTEST_FIRST\n"
    del paceline.env["CUDA_DEVICE_ORDER"]
    paceline.env["CUDA_VISIBLE_DEVICES"] = "0,1"
    assert paceline.succeeds("run", "--devices", "1", "script.py").stdout == "1 None\n"


def test_check_says_what_is_wrong_with_gpus(paceline: Paceline, machine: Machine) -> None:
    found = paceline.json("check")["devices"]
    assert [(gpu["name"], gpu["memory"] >> 20) for gpu in found["nvidia"]] == [("NVIDIA H200", 143771)] * 3
    assert found["driver"] == "570.86.15"
    paceline.env["CUDA_VISIBLE_DEVICES"] = "0,3"
    assert "names 3, but the last GPU here is 2" in paceline("check").stdout
    del paceline.env["CUDA_VISIBLE_DEVICES"]
    machine.has(BUSY, (*OTHER[:2], "lost", *OTHER[3:]))
    assert "GPU is lost" in paceline("check").stdout
    machine.gets_another_driver()
    assert "Driver/library version mismatch; reload the driver, or restart" in paceline("check").stdout
    paceline.script("print('trained')")
    assert paceline.succeeds("run", "script.py").stdout == "trained\n"


def test_telemetry_goes_on_when_a_gpu_is_lost(paceline: Paceline, machine: Machine) -> None:
    paceline.script("import time; time.sleep(600)")
    paceline.succeeds("submit", "--name", "it", "-n", "2", "--devices", "0,2", "script.py")
    try:
        eventually(lambda: measured(paceline, "it"), "it is measured", 0.1)
        assert measured(paceline, "it")[0] == {
            "index": [0, 2], "use": [93.0, None], "memory": [143771 << 20] * 2, "memory_used": [1024 << 20, 512 << 20],
            "temperature": [51.0, None], "power": [402.13, None],
        }  # fmt: skip
        machine.has((*BUSY[:2], "lost", *BUSY[3:]), OTHER, THIRD)
        eventually(lambda: measured(paceline, "it")[-1]["use"][0] is None, "the lost GPU is seen", 0.1)
        last = measured(paceline, "it")[-1]
        assert (last["index"], last["memory"]) == ([0, 2], [None, 143771 << 20])
        assert paceline.succeeds("top", "job", "it").stdout
    finally:
        paceline.succeeds("stop", "--now", "it")


def test_gpus_on_which_the_processes_are(paceline: Paceline, machine: Machine) -> None:
    """A job that was given no devices by name has those that its processes use."""
    paceline.script("import time; time.sleep(600)")
    paceline.succeeds("submit", "--name", "it", "--gpus", "0", "script.py")
    try:
        status = paceline.job() / "status.json"
        eventually(lambda: status.exists() and json.loads(status.read_text()).get("ranks"), "it runs", 0.1)
        (rank,) = json.loads(status.read_text())["ranks"]
        machine.has(BUSY, (*OTHER[:7], f"1 {rank['pid']}"), THIRD)
        eventually(lambda: [1] in [gpus.get("index") for gpus in measured(paceline, "it")], "its GPU is found", 0.1)
    finally:
        paceline.succeeds("stop", "--now", "it")


# What the node side asks of torch in a rank that uses a GPU; its own takes seconds to import, and sees none here.
TORCH = """
from types import SimpleNamespace
cuda = SimpleNamespace(is_initialized=lambda: True, _is_in_bad_fork=lambda: False)
get_num_threads = lambda: 1
"""


@pytest.mark.nightly  # five measurements, each ten seconds after the last
def test_why_of_an_idle_gpu(paceline: Paceline, machine: Machine) -> None:
    """While ranks run code of the script and nothing else keeps the GPU waiting, that is the cause."""
    machine.has((*BUSY[:2], "0", *BUSY[3:]))
    paceline.script(TORCH, "torch.py")
    paceline.script("""
        import time, torch
        def prepare():
            time.sleep(0.05)
        while True:
            prepare()
    """)
    paceline.succeeds("submit", "--name", "it", "-n", "1", "--devices", "0", "script.py")
    try:
        assert "1 % of their memory is used" in why_says(paceline, "it", "GPUs compute in 0 % of the time")
    finally:
        paceline.succeeds("stop", "--now", "it")
