"""What jobs and the machine use: from a /proc of the test's own, and of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import eventually

from paceline.node.machine import meter as usage
from paceline.node.machine import processes
from paceline.node.machine.gpus import USE_FIELDS, Gpu, GpuProcess, in_use, parse_nvidia_smi, with_processes
from paceline.node.machine.meter import Meter, Process, snapshot, spent

if TYPE_CHECKING:
    from collections.abc import Iterator

TICKS = os.sysconf("SC_CLK_TCK")
NOWHERE = Path("/nowhere")


class Proc:
    """A /proc with what a test puts there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self.machine(0)

    def put(
        self, pid: int, parent: int = 1, own: int = 0, reaped: int = 0, start: int = 7, state: str = "S",
        name: str = "python", pages: int = 1, pss: int | None = None, gpu: bool = False,
    ) -> None:  # fmt: skip
        folder = self.path / str(pid)
        (folder / "fd").mkdir(parents=True, exist_ok=True)
        user, system = own - own // 3, own // 3
        fields = [pid, f"({name})", state, parent, *[0] * 9, user, system, reaped, 0, *[0] * 4, start, 9, pages]
        (folder / "stat").write_text(" ".join(map(str, fields + [0] * 28)) + "\n")
        if pss is not None:
            (folder / "smaps_rollup").write_text(f"00-ff [rollup]\nRss: 99 kB\nPss:  {pss} kB\nPss_Anon: 1 kB\n")
        if gpu:
            (folder / "fd" / "5").symlink_to("/dev/nvidia0")

    def remove(self, pid: int) -> None:
        for path in sorted((self.path / str(pid)).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        (self.path / str(pid)).rmdir()

    def machine(self, busy: int) -> None:
        cpus = "".join(f"cpu{n} {busy} 0 0 999 5 0 0 0 0 0\n" for n in range(1024))
        (self.path / "stat").write_text(f"cpu  1 2 3\n{cpus}intr 5\n")


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path / "proc")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "INTERVAL", 0.0)


def meter(proc: Proc, *gpus: Gpu) -> Meter:
    return Meter(lambda: gpus, proc.path, NOWHERE)


def process(pid: int, own: int, reaped: int = 0, start: int = 7) -> Process:
    return Process(pid, 1, start, own, reaped, 0, False)


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_tree_is_a_process_and_all_that_descend_from_it(proc: Proc) -> None:
    proc.put(10, name="a (strange) name) 5 R 1")
    proc.put(11, parent=10)
    proc.put(12, parent=11, state="Z")
    proc.put(13, parent=12)
    proc.put(20)
    (proc.path / "30").mkdir()  # one that ends just now
    (proc.path / "31").mkdir()
    (proc.path / "31" / "stat").write_text("31 (x")
    seen = snapshot(proc.path, NOWHERE)
    assert set(seen.tree(10, 7)) == {10, 11, 12, 13}
    assert seen.tree(10, 8) == {}, "another process has got its number"
    assert seen.tree(99, 7) == {}


def test_each_process_is_read_once_however_many_jobs_there_are(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    for job in range(100):
        proc.put(1000 * (job + 1), pages=1)
        for child in range(1, 8):
            proc.put(1000 * (job + 1) + child, parent=1000 * (job + 1), own=child)
    it = meter(proc)
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(usage.os, "open", lambda path, *args: opened.append(str(path)) or real(path, *args))
    it.read()
    found = it.jobs({f"job-{n}": (1000 * (n + 1), 7) for n in range(100)}, {})
    assert len(found) == 100
    assert {use["processes"] for use in found.values()} == {8}
    assert len([path for path in opened if path.endswith("/stat")]) == len(set(opened)) == 800


def test_processor_time_counts_what_came_and_went() -> None:
    before = {p.pid: p for p in (process(1, 100, reaped=50), process(2, 30, reaped=6), process(3, 10, reaped=5))}
    # 2, which had reaped 6 ticks, went on for 4 and was waited for by 1, as was one that was never seen (20 ticks); 3
    # goes on; 4 is new.
    after = {p.pid: p for p in (process(1, 110, 50 + 40 + 20), process(3, 11, 5), process(4, 7, 2))}
    assert spent(before, after) == (10 + 4 + 20 + 1 + 7 + 2) / TICKS


def test_a_number_that_was_given_again_is_another_process() -> None:
    assert spent({5: process(5, 1000)}, {5: process(5, 3, start=8)}) == 3 / TICKS


trees = st.dictionaries(
    st.integers(1, 5),
    st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(1, 2)),
).map(lambda found: {pid: process(pid, *what) for pid, what in found.items()})


@given(trees, trees)
def test_processor_time_is_never_negative(before: dict[int, Process], after: dict[int, Process]) -> None:
    assert spent(before, after) >= 0
    assert spent(before, before) == 0


def test_cpu_and_memory_of_a_job(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage.time, "monotonic", iter([0.0, 1.0, *[4.0] * 100]).__next__)
    proc.put(10, own=100, pss=1000)
    proc.put(11, parent=10, own=50, pages=3)  # its part of what is shared cannot be read
    proc.put(12, parent=10, state="Z", own=10, pages=100)
    it = meter(proc)
    proc.put(10, own=100 + 3 * TICKS, pss=1000)
    proc.put(11, parent=10, own=50 + 3 * TICKS, pages=3)
    it.read()
    (use,) = it.jobs({"a": (10, 7), "gone": (10, 6)}, {}).values()
    assert use["cpu"] == pytest.approx(6 / 4)
    assert use["memory"] == 1000 * 1024 + 3 * os.sysconf("SC_PAGE_SIZE")
    assert use["processes"] == 2
    assert use["gpus"] == ()


def test_where_there_is_no_time_for_shared_memory_it_counts_in_full_and_is_read_the_next_time(
    proc: Proc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "MEMORY_SECONDS", -1.0)
    proc.put(10, pages=5, pss=4)
    it = meter(proc)
    it.read()
    assert it.jobs({"a": (10, 7)}, {})["a"]["memory"] == 5 * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(usage, "MEMORY_SECONDS", 60.0)
    assert it.jobs({"a": (10, 7)}, {})["a"]["memory"] == 4096
    monkeypatch.setattr(usage, "MEMORY_SECONDS", -1.0)
    assert it.jobs({"a": (10, 7)}, {})["a"]["memory"] == 4096, "as it was known last"


# -- real processes ----------------------------------------------------------------------------------------------------

PARENT = """
    import os, subprocess, sys
    data = bytearray(os.urandom(1 << 20) * 120)
    pids = []
    for _ in range(3):
        pid = os.fork()
        if not pid:
            sys.stdin.read()
            os._exit(0)
    print("ready", flush=True)
    while True:  # nobody lives long enough to be seen
        subprocess.run([sys.executable, "-S", "-c", "sum(range(300000))"])
"""


@pytest.fixture
def tree() -> Iterator[subprocess.Popen[bytes]]:
    code = "\n".join(line[4:] for line in PARENT.splitlines())
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_real_processes_that_share_memory_and_come_and_go(tree: subprocess.Popen[bytes]) -> None:
    it = Meter(lambda: ())
    agent = {"a": (tree.pid, processes.start_time(tree.pid))}
    total = 0.0

    def busy() -> bool:
        nonlocal total
        it.read()
        (use,) = it.jobs(agent, {}).values()
        total += use["cpu"]
        assert use["processes"] >= 4
        return total > 0 and 120 << 20 < use["memory"] < 240 << 20  # four processes have it, once

    eventually(busy, "the time of children that have ended is counted, and shared memory once")


def test_this_machine() -> None:
    it = Meter(lambda: ())
    it.read()
    now = it.machine(Path("/proc"))
    assert now["cores"] > 0
    assert now["load"] >= 0
    assert 0 < now["memory_used"] <= now["memory"]
    assert it.machine(Path("/"))["disk"] > it.machine(Path("/"))["disk_used"] > 0


# -- the machine -------------------------------------------------------------------------------------------------------


def test_load_is_of_the_cores_we_may_use(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage.os, "sched_getaffinity", lambda _: {0, 3, 5})
    proc.machine(7 * TICKS)
    assert usage.busy_seconds(proc.path, NOWHERE) == 21


@pytest.mark.parametrize("version", [1, 2])
def test_load_is_of_the_control_group_that_has_a_quota(proc: Proc, tmp_path: Path, version: int) -> None:
    cgroup = tmp_path / "cgroup"
    (proc.path / "self").mkdir()
    if version == 2:
        (proc.path / "self" / "cgroup").write_text("0::/box/inner\n")
        (cgroup / "box" / "inner").mkdir(parents=True)
        (cgroup / "box" / "inner" / "cpu.max").write_text("max 100000\n")
        (cgroup / "box" / "inner" / "cpu.stat").write_text("usage_usec 1000000\n")
        (cgroup / "box" / "cpu.max").write_text("150000 100000\n")
        (cgroup / "box" / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    else:
        (proc.path / "self" / "cgroup").write_text("4:cpu,cpuacct:/box\n")
        box = cgroup / "cpu,cpuacct" / "box"
        box.mkdir(parents=True)
        (box / "cpu.cfs_quota_us").write_text("150000\n")
        (box / "cpu.cfs_period_us").write_text("100000\n")
        (box / "cpuacct.usage").write_text("2500000000\n")
    assert usage.busy_seconds(proc.path, cgroup) == 2.5
    it = Meter(lambda: (), proc.path, cgroup)
    assert it.machine(tmp_path)["cores"] == min(1.5, len(os.sched_getaffinity(0)))


# -- GPUs --------------------------------------------------------------------------------------------------------------


def test_a_gpu_is_shared_out_by_process(proc: Proc) -> None:
    proc.put(10)
    proc.put(11, parent=10, gpu=True)
    proc.put(12, parent=10, gpu=True)
    proc.put(20, gpu=True)
    gpu = Gpu(0, "GPU-1", use=90.0, memory=100, memory_used=80, processes=(
        GpuProcess(11, 20, 30.0), GpuProcess(12, 10, 5.0), GpuProcess(20, 40, 50.0)))  # fmt: skip
    it = meter(proc, gpu)
    it.read()
    found = it.jobs({"a": (10, 7), "b": (20, 7)}, {})
    assert found["a"]["gpus"] == ({"device": "0", "use": 35.0, "memory": 30},)
    assert found["b"]["gpus"] == ({"device": "0", "use": 50.0, "memory": 40},)


def test_where_use_is_not_known_by_process_it_is_that_of_a_gpu_that_nobody_else_uses(proc: Proc) -> None:
    proc.put(10, gpu=True)
    proc.put(20, gpu=True)
    mine = Gpu(0, "GPU-1", use=90.0, memory_used=80, processes=(GpuProcess(10, 20),))
    shared = Gpu(1, "GPU-2", use=70.0, memory_used=80, processes=(GpuProcess(10, 20), GpuProcess(20, None)))
    it = meter(proc, mine, shared)
    it.read()
    found = it.jobs({"a": (10, 7), "b": (20, 7)}, {})
    assert found["a"]["gpus"] == (
        {"device": "0", "use": 90.0, "memory": 20},
        {"device": "1", "use": None, "memory": 20},
    )
    assert found["b"]["gpus"] == ({"device": "1", "use": None, "memory": None},)


@pytest.mark.parametrize("pids", [(), (40_000, 40_001), (11,)])  # the last one is by chance a process of ours
def test_in_another_pid_namespace_a_job_has_what_is_used_on_its_own_devices(proc: Proc, pids: tuple[int, ...]) -> None:
    proc.put(10)
    proc.put(11, parent=10)
    gpus = [
        Gpu(n, f"GPU-{n}{n}", use=60.0 + n, memory_used=80, processes=tuple(GpuProcess(pid, 5) for pid in pids))
        for n in range(3)
    ]
    it = meter(proc, *gpus)
    it.read()
    assert it.jobs({"a": (10, 7)}, {"a": ["GPU-1", "2"]})["a"]["gpus"] == (
        {"device": "GPU-1", "use": 61.0, "memory": 80},
        {"device": "2", "use": 62.0, "memory": 80},
    )
    assert it.jobs({"a": (10, 7)}, {})["a"]["gpus"] == ()


SMI = """0, GPU-5a1, NVIDIA H200, 93, 143771, 1024, 51, 402.13
1, GPU-5a2, NVIDIA H200, [N/A], 143771, 1, [Not Supported], [N/A]
Failed to initialize NVML
"""


def test_nvidia_smi_is_read() -> None:
    gpus = with_processes(
        parse_nvidia_smi(SMI, USE_FIELDS)[0], "GPU-5a1, 4711, 900\nGPU-5a1, 4712, [N/A]\n[Insufficient Permissions]\n"
    )
    assert gpus == (
        Gpu(0, "GPU-5a1", "NVIDIA H200", 93.0, 143771 << 20, 1 << 30, 51.0, 402.13,
            (GpuProcess(4711, 900 << 20), GpuProcess(4712, None))),
        Gpu(1, "GPU-5a2", "NVIDIA H200", None, 143771 << 20, 1 << 20, None, None),
    )  # fmt: skip


@given(st.text(), st.text())
def test_whatever_nvidia_smi_says(gpus: str, found: str) -> None:
    with_processes(parse_nvidia_smi(gpus, USE_FIELDS)[0], found)


def test_there_may_be_no_nvidia_smi() -> None:
    assert in_use(("no-such-program",)) == ()
