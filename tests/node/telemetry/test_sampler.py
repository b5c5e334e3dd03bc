"""What a job uses: of real processes, of recorded counters, and of GPUs that ranks have."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.node.machine.gpus import USE_FIELDS, Gpu, parse_nvidia_smi, with_processes
from paceline.node.telemetry.recorder import GpuUse
from paceline.node.telemetry.sampler import HostUse, RankNow, Sampler, traffic

BURN = """
import sys, time
held = bytearray(64 << 20)
end = time.process_time() + 0.3
while time.process_time() < end: pass
print(flush=True); sys.stdin.read()
"""
ROWS = "0, GPU-a, H100, 20, 81920, 8192, 30, 90\n1, GPU-b, H100, 90, 81920, 73728, 31, 91\n"


def sampler(tmp_path: Path, gpus: tuple[Gpu, ...] = ()) -> Sampler:
    return Sampler(tmp_path, lambda: gpus)


def taken(sample: Sampler, *ranks: RankNow) -> Any:
    line, _ = sample.take(os.getpid(), ranks)
    return line


def test_ranks_and_their_job(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        sample, rank = sampler(tmp_path), RankNow(3, busy.pid)
        assert taken(sample, rank) is None
        busy.stdout.readline()
        line = taken(sample, rank)
        assert line["ranks"]["rank"] == [3]
        assert line["ranks"]["cpu"][0] * line["seconds"] == pytest.approx(0.3, abs=0.25)
        assert 64 << 20 <= line["ranks"]["memory"][0] <= line["job"]["memory"]
        assert line["job"]["cpu"] >= line["ranks"]["cpu"][0]
        assert line["job"]["processes"] >= 2
        assert line["machine"]["memory"] > line["machine"]["memory_used"] > 0
        assert "gpus" not in line
        other = taken(sample, RankNow(3, os.getpid()))
        assert "cpu" not in other["ranks"], "a process that has just come has no rate"
        assert busy.stdin is not None
        busy.stdin.close()


@pytest.mark.parametrize(
    ("before", "after", "shares"),
    [
        ({}, {}, None),
        ({"parts": {"workers": 1}}, {"parts": {"workers": 4, "forward": 4, "import": 1}},
         (0.375, 0.5, 0, 0, 0, 0, 0, 0, 0.125)),
        ({}, {"parts": {"evaluation": 2, "logging": 1, "script": 1}}, (0, 0, 0, 0, 0.5, 0.25, 0.25, 0, 0)),
        ({"times": {"data": 1.0, "total": 4.0, "steps": 4}},
         {"times": {"data": 2.0, "forward_backward": 2.0, "sync": 4.0, "total": 14.0, "steps": 14}, "parts": {"x": 9}},
         (0.1, 0.2, 0.4, 0, 0, 0, 0, 0, 0.3)),
        ({}, {"times": {"data": 2.0, "total": 10.0, "steps": 1}, "parts": {"forward": 9, "evaluation": 3, "x": 1}},
         (0.2, 0, 0, 0, 0.6, 0, 0, 0, 0.2)),
    ],
)  # fmt: skip
def test_shares_of_the_time(tmp_path: Path, before: Any, after: Any, shares: tuple[float, ...] | None) -> None:
    sample = sampler(tmp_path)
    taken(sample, RankNow(0, os.getpid(), **before))
    ranks = taken(sample, RankNow(0, os.getpid(), **after))["ranks"]
    names = ("data", "compute", "exchange", "checkpoint", "evaluation", "logging", "script", "idle", "other")
    assert (None if shares is None else tuple(ranks[name][0] for name in names)) == shares
    assert ("steps" in ranks) == ("times" in after)


def test_a_rank_that_stands_still_is_idle(tmp_path: Path) -> None:
    """It is not sampled then. One whose GPU works, or that has just come, may be busy."""
    gpus = parse_nvidia_smi(ROWS, USE_FIELDS)[0]
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        process.stdout.readline()  # it has begun
        for found, device, idle in (((), "", [1.0]), (gpus, "GPU-a", None)):
            sample, rank = sampler(tmp_path, found), RankNow(0, process.pid, device)
            taken(sample, RankNow(0, os.getpid()))
            assert "idle" not in taken(sample, rank)["ranks"]
            assert taken(sample, rank)["ranks"].get("idle") == idle
        process.stdin.close()


def test_a_rank_whose_processes_work_is_not_idle(tmp_path: Path) -> None:
    """Its main thread waits for them: that is its script's time."""
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        sample, waits = sampler(tmp_path), [RankNow(0, process.pid, parts={"idle": count}) for count in (0, 100)]
        taken(sample, waits[0])
        process.stdout.readline()
        ranks = taken(sample, waits[1])["ranks"]
        assert ranks["idle"][0] == pytest.approx(max(0.0, 1 - ranks["cpu"][0]), abs=0.002)
        assert ranks["idle"][0] + ranks["script"][0] == pytest.approx(1)


@pytest.mark.parametrize(
    ("processes", "device", "mine", "use"),
    [
        ("GPU-a, ME\nGPU-b, 1", "", [0], 0.2),
        (f"GPU-a, {1 << 30}", "", [0, 1], 0.55),  # in a container, whose processes have other numbers outside
        ("GPU-b, 1", "", [], None),
        ("GPU-b, 1", "1", [1], 0.9),
        ("", "GPU-a", [0], 0.2),
    ],
)
def test_the_gpus_of_the_ranks(tmp_path: Path, processes: str, device: str, mine: list[int], use: float | None) -> None:
    gpus = with_processes(parse_nvidia_smi(ROWS, USE_FIELDS)[0], processes.replace("ME", str(os.getpid())))
    sample, sums = sampler(tmp_path, gpus), GpuUse()
    rank = RankNow(0, os.getpid(), device)
    assert sums.known() == {}
    for _ in range(6):
        line, found = sample.take(os.getpid(), [rank])
        sums.add(found)
    assert line is not None
    assert line.get("gpus", {"index": []})["index"] == mine  # type: ignore[typeddict-item]
    assert sums.known().get("gpu_use") == (None if use is None else pytest.approx(use))


def test_the_network(tmp_path: Path) -> None:
    """Interfaces with a device count, else all that are no bridge; InfiniBand counts four bytes at a time."""
    (tmp_path / "self" / "net").mkdir(parents=True)
    (tmp_path / "self" / "net" / "dev").write_text(
        "Inter-|   Receive  |  Transmit\n face |bytes packets|bytes\n"
        "    lo: 900 1 0 0 0 0 0 0 900 1 0 0 0 0 0 0\n  eth0: 100 1 0 0 0 0 0 0 10 1 0 0 0 0 0 0\n"
        "docker0: 50 1 0 0 0 0 0 0 5 1 0 0 0 0 0 0\n  tap1:7 1 0 0 0 0 0 0 3 1 0 0 0 0 0 0\n"
    )
    net, bands = tmp_path / "net", tmp_path / "infiniband"
    assert traffic(tmp_path, net, bands) == (107, 13)
    (net / "eth0" / "device").mkdir(parents=True)
    counters = bands / "mlx5_0" / "ports" / "1" / "counters"
    counters.mkdir(parents=True)
    (counters / "port_rcv_data").write_text("250\n")
    (counters / "port_xmit_data").write_text("100\n")
    assert traffic(tmp_path, net, bands) == (1100, 410)


def test_what_else_a_machine_does(tmp_path: Path) -> None:
    proc, sys_ = tmp_path / "proc", tmp_path / "sys"
    assert HostUse(proc, sys_).known(time.monotonic() + 10) == {"sent": 0, "swapped": 0, "slowed": 0}

    def write(sent: int, swapped: int, stalled: int, slowed: int, words: int) -> None:
        for path, text in (
            (proc / "self" / "net" / "dev", f"  eth0: 100 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0\n"),
            (proc / "vmstat", f"pgpgin 3\npswpin {swapped}\npswpout {swapped}\n"),
            (proc / "pressure" / "memory", f"some avg10=0.00 avg60=0.00 total={stalled}\nfull avg10=0.00 total=1\n"),
            (sys_ / "devices/system/cpu/cpu0/thermal_throttle/core_throttle_count", f"{slowed}\n"),
            (sys_ / "class/infiniband/mlx5_0/ports/1/counters/port_xmit_data", f"{words}\n"),
            (sys_ / "class/net/eth0/speed", "1000\n"),
            (sys_ / "class/net/eth0/device/vendor", "0x8086\n"),
            (sys_ / "class/net/lo/speed", "-1\n"),
            (sys_ / "class/net/veth1/speed", "10000\n"),  # of a container; it has no device
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    write(1000, 10, 500, 2, 25)
    use, now = HostUse(proc, sys_), time.monotonic()
    write(51000, 20, 4_000_500, 5, 275)
    found = use.known(now + 10)
    assert (found["slowed"], found["link"], found["stalled"]) == (3, 125e6, pytest.approx(0.4, rel=0.1))
    assert (found["sent"], found["infiniband"]) == (pytest.approx(5100, rel=0.1), pytest.approx(100, rel=0.1))
    assert found["swapped"] == pytest.approx(2 * os.sysconf("SC_PAGE_SIZE"), rel=0.1)
