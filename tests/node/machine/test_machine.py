"""What node finds out about a machine, on machines made up of files."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.contract.memory import Memory, machine_memory
from paceline.node.machine import gpus, hardware, network, numa, software

if TYPE_CHECKING:
    from collections.abc import Callable


GIB = 1 << 30


# Devices


def executable(path: Path, text: str) -> tuple[str, ...]:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return (str(path),)


def test_nvidia_smi_is_asked(tmp_path: Path) -> None:
    command = executable(tmp_path / "smi", "echo '0, NVIDIA H200, 143771, 3, 570.86.15'; echo '1, Odd, [N/A], [N/A], '")
    seen = gpus.installed({"CUDA_VISIBLE_DEVICES": "0", "HOME": "/"}, tmp_path, tmp_path, command)
    assert seen.nvidia == (
        gpus.Gpu(0, name="NVIDIA H200", memory=143771 << 20, memory_used=3 << 20),
        gpus.Gpu(1, name="Odd"),
    )
    assert seen.driver == "570.86.15"
    assert seen.to_dict()["nvidia"] == (  # keys that users rely on
        {"index": 0, "name": "NVIDIA H200", "memory": 143771 << 20, "used": 3 << 20},
        {"index": 1, "name": "Odd", "memory": None, "used": None},
    )
    assert seen.visible == {"CUDA_VISIBLE_DEVICES": "0"}
    assert seen.problem is None


def test_when_nvidia_smi_fails_or_hangs_the_kernel_is_asked(tmp_path: Path) -> None:
    card = tmp_path / "driver/nvidia/gpus/0000:01:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text("Model: \t\t NVIDIA A100\nIRQ: 1\n")
    (tmp_path / "driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat\n")
    failing = executable(tmp_path / "smi", "echo 'Failed to initialize NVML'; exit 18")
    seen = gpus.installed({}, tmp_path, tmp_path, failing)
    assert (seen.nvidia, seen.driver) == ((gpus.Gpu(0, name="NVIDIA A100"),), "535.104.05")
    assert seen.problem == "Failed to initialize NVML"
    assert gpus.ask(("tail", "-f", "/dev/null"), 0.01) == ("", "gave no answer within 0.01 s")


def test_amd_gpus_are_the_nodes_with_a_gpu_id(tmp_path: Path) -> None:
    for number, gpu_id in ((0, 0), (2, 7), (10, 9)):
        bank = tmp_path / str(number) / "mem_banks/0"
        bank.mkdir(parents=True)
        (bank / "properties").write_text(f"heap_type 1\nsize_in_bytes {number * GIB}\n")
        (tmp_path / str(number) / "gpu_id").write_text(f"{gpu_id}\n")
        (tmp_path / str(number) / "name").write_text(f"card{number}\n")
    assert gpus.amd_of_kernel(tmp_path) == (
        gpus.Gpu(0, name="card2", memory=2 * GIB),
        gpus.Gpu(1, name="card10", memory=10 * GIB),
    )


@given(st.text())
def test_no_answer_of_nvidia_smi_is_too_odd(text: str) -> None:
    found, _ = gpus.parse_nvidia_smi(text, gpus.MODEL_FIELDS)
    assert all(gpu.index >= 0 for gpu in found)


@given(st.lists(st.tuples(st.integers(0, 99), st.text("abcXYZ 0123", min_size=1), st.integers(0, 10**6)), max_size=4))
def test_every_row_of_nvidia_smi_is_a_gpu(rows: list[tuple[int, str, int]]) -> None:
    text = "\n".join(f"{index}, {name}, {memory}, 0, 1.2" for index, name, memory in rows)
    found, driver = gpus.parse_nvidia_smi(text, gpus.MODEL_FIELDS)
    assert [(gpu.index, gpu.memory) for gpu in found] == [(index, memory << 20) for index, _, memory in rows]
    assert driver == ("1.2" if rows else None)


# Cores and memory


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal:       16777216 kB\nMemFree:        1 kB\nMemAvailable:   8388608 kB\n"


def test_the_tightest_limit_of_cgroups_v2_counts_and_its_cache_is_available(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "self/cgroup": "0::/slice/job\n",
            "meminfo": MEMINFO,
            "cg/slice/job/memory.max": "max\n",
            "cg/slice/memory.max": f"{4 * GIB}\n",
            "cg/slice/memory.current": f"{3 * GIB}\n",
            "cg/slice/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            "cg/slice/job/cpu.max": "150000 100000\n",
            "cg/slice/job/cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
            "cg/slice/cpu.max": "max 100000\n",
            "cg/slice/cpu.stat": "usage_usec 1000000\n",
            "cg/slice/pids.max": "77\n",
        },
    )
    assert machine_memory(tmp_path, tmp_path / "cg") == Memory(16 * GIB, 2 * GIB, 4 * GIB)
    assert hardware.cores(tmp_path, tmp_path / "cg").quota == 1.5
    assert hardware.busy_seconds(tmp_path, tmp_path / "cg") == 2.5, "of the group that has a quota"
    assert hardware.limits(tmp_path, tmp_path / "cg").processes == 77


def test_in_a_container_of_cgroups_v1_the_names_of_the_outside_are_not_there(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/x\n",
            "meminfo": MEMINFO,
            "cg/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "cg/memory/memory.usage_in_bytes": f"{GIB}\n",
            "cg/cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
            "cg/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "cg/cpu,cpuacct/cpuacct.usage": "2500000000\n",
        },
    )
    assert machine_memory(tmp_path, tmp_path / "cg") == Memory(16 * GIB, GIB, 2 * GIB)
    assert hardware.cores(tmp_path, tmp_path / "cg").quota == 2.0
    assert hardware.busy_seconds(tmp_path, tmp_path / "cg") == 2.5
    capacity = hardware.capacity(tmp_path, tmp_path, tmp_path / "cg")
    assert capacity["cores"] == min(2.0, len(os.sched_getaffinity(0)))
    assert (capacity["memory"], capacity["memory_used"]) == (2 * GIB, GIB)
    assert capacity["disk"] > capacity["disk_used"] > 0


def test_load_is_of_the_cores_we_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5})
    ticks = 7 * os.sysconf("SC_CLK_TCK")
    cpus = "".join(f"cpu{n} {ticks} 0 0 999 5 0 0 0 0 0\n" for n in range(1024))
    tree(tmp_path, {"stat": f"cpu  1 2 3\n{cpus}intr 5\n"})
    assert hardware.busy_seconds(tmp_path, tmp_path / "cg") == 21


def test_what_v1_calls_no_limit_is_none(tmp_path: Path) -> None:
    files = {"self/cgroup": "4:memory:/\n2:cpu:/\n", "meminfo": MEMINFO, "cg/cpu/cpu.cfs_quota_us": "-1\n"}
    tree(tmp_path, {**files, "cg/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert machine_memory(tmp_path, tmp_path / "cg").limit is None
    assert hardware.cores(tmp_path, tmp_path / "cg").quota is None


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cgroup=st.text() | st.from_regex(r"[0-9]:[a-z,]{0,9}:/[a-z./]{0,9}"), limit=st.text())
def test_no_file_of_the_kernel_is_too_odd(tmp_path: Path, cgroup: str, limit: str) -> None:
    odd = limit.encode(errors="replace").decode()
    files = {"self/cgroup": cgroup, "meminfo": limit, "cg/memory.max": limit, "cg/cpu.max": odd, "cg/pids.max": odd}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode(errors="replace"))
    assert machine_memory(tmp_path, tmp_path / "cg").total >= 0
    assert (hardware.cores(tmp_path, tmp_path / "cg").quota or 1) > 0
    assert (hardware.limits(tmp_path, tmp_path / "cg").processes or 0) >= 0


def test_the_space_of_a_folder_to_be_is_that_of_the_one_above(tmp_path: Path) -> None:
    space = hardware.space(tmp_path / "a" / "b")
    assert space is not None
    assert (space.exists, space.writable) == (False, True)
    assert 0 < space.free <= space.total


# Network


def test_interfaces_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "lo/flags": "0x8\n",
            "eth0/flags": "0x1003\n",
            "eth0/speed": "25000\n",
            "veth/flags": "0x1003\n",
            "veth/speed": "-1\n",
            "if_inet6": "fd000000000000000000000000000002 04 40 00 82     eth0\n",
        },
    )
    found = network.interfaces(
        ["lo", "eth0", "veth", "new"], {"eth0": "10.0.0.2"}.get, net=tmp_path, if_inet6=tmp_path / "if_inet6"
    )
    assert found == (
        network.Interface("lo", up=False, loopback=True),
        network.Interface("eth0", True, False, "10.0.0.2", ("fd00::2",), 25000),
        network.Interface("veth", True, False),
        network.Interface("new", None, False),
    )


@given(st.text())
def test_no_list_of_addresses_is_too_odd(text: str) -> None:
    network.parse_if_inet6(text)


@given(st.ip_addresses(v=6))
def test_an_address_of_the_kernel_is_read(address: Any) -> None:
    line = f"{address.packed.hex()} 02 40 00 80 eth0"
    assert network.parse_if_inet6(line) == {"eth0": [str(address)]}


def answers(*addresses: str) -> Callable[..., list[Any]]:
    return lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]


def test_the_first_address_that_is_of_this_machine_is_gloos() -> None:
    host = network.host_name("node0", answers("203.0.113.9", "127.0.1.1"))
    assert host.addresses == ("203.0.113.9", "127.0.1.1")
    assert host.usable == "127.0.1.1"
    found = (network.Interface("lo", True, True, "127.0.0.1"), network.Interface("eth0", True, False, "10.0.0.2"))
    assert network.gloo_choice({}, found, host).interface == "lo"
    assert network.gloo_choice({}, found, replace(host, usable="10.0.0.2")).interface == "eth0"
    assert network.gloo_choice({}, found, replace(host, usable=None)).address == "127.0.0.1"
    assert network.gloo_choice({"GLOO_SOCKET_IFNAME": "eth0,lo"}, found, host).address == "10.0.0.2"
    assert network.gloo_choice({"GLOO_SOCKET_IFNAME": "eth0,ib0"}, found, host).address is None


def test_a_resolver_that_fails_or_does_not_answer_is_a_problem() -> None:
    def unknown(*_: object, **__: object) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    assert network.host_name("node0", unknown).problem == "Name or service not known"
    reader, writer = socket.socketpair()
    with reader, writer:
        silent = network.host_name("node0", lambda *_, **__: [reader.recv(1)], seconds=0.01)
        assert silent.problem == "no answer within 0.01 s"
        writer.send(b"x")  # let the thread end


# Software


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "CPU"),
        ("__version__ = '2.6.0+cu126'\ncuda: Optional[str] = '12.6'\nhip: Optional[str] = None\n", "CUDA 12.6"),
        ("cuda = None\nhip = '6.2.41133'\n", "ROCm 6.2.41133"),
        ("debug = False\n", None),
        ("cuda = open('x')\n", "CPU"),
        ("", None),
    ],
)
def test_the_build_of_torch_is_read_from_its_version_file(text: str, build: str | None) -> None:
    assert software.torch_build(text) == build


@given(st.text() | st.from_regex(r"cuda(: [a-z]*)? = [('\[{0-9\-]{0,9}"))
def test_no_version_file_is_too_odd(text: str) -> None:
    software.torch_build(text)


@given(st.text(st.characters(codec="utf-8")))
def test_what_a_line_assigns_is_read(value: str) -> None:
    assert software.assigned(f"a = 1\nname: str = {value!r}\n", "name") == value


def test_what_lies_in_the_current_folder_is_not_installed(tmp_path: Path) -> None:
    tree(tmp_path, {"here/jax/__init__.py": "", "site/torch/__init__.py": "", "site/torch/version.py": "cuda = '12.8'"})
    path = ["", str(tmp_path / "here"), str(tmp_path / "site")]
    found = software.packages(tmp_path / "here", path)
    assert found["torch"] is not None
    assert found["torch"].build == "CUDA 12.8"
    assert found["jax"] is None
    assert software.shadows(tmp_path / "here", path) == {}  # there is no jax that it would hide
    tree(tmp_path, {"here/torch/__init__.py": ""})
    assert software.shadows(tmp_path / "here", path) == {"torch": os.path.join("torch", "__init__.py")}


# Cores near a GPU


def two_sockets(root: Path) -> tuple[Path, Path]:
    """2 sockets of 2 NUMA nodes; 4 cores of 2 threads and a GPU for each node; 2 cores share a cache."""
    files: dict[str, str] = {}
    for node in range(4):
        first = node * 4
        files[f"sys/devices/system/node/node{node}/cpulist"] = f"{first}-{first + 3},{first + 16}-{first + 19}\n"
        for core in (*range(first, first + 4), *range(first + 16, first + 20)):
            cpu, base = f"sys/devices/system/cpu/cpu{core}", core % 16
            files[f"{cpu}/topology/physical_package_id"] = f"{node // 2}\n"
            files[f"{cpu}/topology/thread_siblings_list"] = f"{base},{base + 16}\n"
            low = base // 2 * 2
            files[f"{cpu}/cache/index0/type"] = "Data\n"
            files[f"{cpu}/cache/index0/level"] = "1\n"
            files[f"{cpu}/cache/index0/shared_cpu_list"] = f"{base},{base + 16}\n"
            files[f"{cpu}/cache/index3/type"] = "Unified\n"
            files[f"{cpu}/cache/index3/level"] = "3\n"
            files[f"{cpu}/cache/index3/shared_cpu_list"] = f"{low}-{low + 1},{low + 16}-{low + 17}\n"
        bus = f"0000:{node:x}b:00.0"
        files[f"sys/bus/pci/devices/{bus}/numa_node"] = f"{3 - node}\n"
        files[f"proc/driver/nvidia/gpus/{bus}/information"] = f"Model: NVIDIA H200\nGPU UUID:  GPU-{node}abc\n"
    tree(root, files)
    return root / "proc", root / "sys"


@pytest.mark.parametrize(
    ("mode", "devices", "expected"),
    [
        ("node", ("0", "3"), [{12, 13, 14, 15, 28, 29, 30, 31}, {0, 1, 2, 3, 16, 17, 18, 19}]),
        ("node", ("GPU-1abc",), [{8, 9, 10, 11, 24, 25, 26, 27}]),
        ("node", None, [{0, 1, 2, 3, 16, 17, 18, 19}, {4, 5, 6, 7, 20, 21, 22, 23}]),
        ("socket", ("0",), [{*range(8, 16), *range(24, 32)}]),
        ("exclusive", ("3", "3", "3"), [{0, 1, 16, 17}, {2, 18}, {3, 19}]),
        ("core-complex", ("3", "3", "3"), [{0, 1, 16, 17}, {2, 3, 18, 19}, {0, 1, 16, 17}]),
        ("exclusive", ("0", "3"), [{12, 13, 14, 15, 28, 29, 30, 31}, {0, 1, 2, 3, 16, 17, 18, 19}]),
    ],
)
def test_cores_near_a_gpu(tmp_path: Path, mode: str, devices: tuple[str, ...] | None, expected: list[set[int]]) -> None:
    proc, sys = two_sockets(tmp_path)
    assert numa.cores_of(mode, len(expected), devices, range(32), proc=proc, sys=sys) == expected


def test_cores_that_a_process_may_not_use_are_left_out(tmp_path: Path) -> None:
    proc, sys = two_sockets(tmp_path)
    assert numa.cores_of("node", 1, ("3",), (1, 2, 9), proc=proc, sys=sys) == [{1, 2}]
    with pytest.raises(numa.CannotBind, match="rank 0's GPU is at NUMA node 3, of which this process may use no core"):
        numa.cores_of("node", 1, ("0",), (1, 2, 9), proc=proc, sys=sys)
    with pytest.raises(numa.CannotBind, match="3 ranks share NUMA node 0, which has 2 physical cores to use"):
        numa.cores_of("exclusive", 3, ("3",), (1, 2, 9), proc=proc, sys=sys)


@given(st.sampled_from(numa.MODES), st.integers(1, 9), st.sets(st.integers(0, 63), min_size=1))
def test_without_files_all_cores_are_one_node(mode: str, ranks: int, usable: set[int]) -> None:
    empty = Path("/nowhere")
    if mode == "exclusive" and ranks > len(usable):
        with pytest.raises(numa.CannotBind):
            numa.cores_of(mode, ranks, None, usable, proc=empty, sys=empty)
        return
    found = numa.cores_of(mode, ranks, None, usable, proc=empty, sys=empty)
    assert len(found) == ranks
    assert set().union(*found) <= usable
    if mode == "exclusive":
        assert sum(map(len, found)) == len(usable)
