"""The lab itself: what is done to its hosts has the effect that it has on real ones, and can be undone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually

from .lab import remove_leftovers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .lab import Host, Lab

REACH = """
import socket, sys
socket.create_connection((sys.argv[1], 22), 0.5).close()
"""
# Prints when it is connected, and then how it ended: a peer that closes or resets, or silence.
LISTEN = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 22), 5)
connection.recv(100)
print("connected", flush=True)
sys.stdin.readline()
connection.settimeout(0.3)
try:
    print("closed" if connection.recv(100) == b"" else "data")
except TimeoutError:
    print("silent")
"""


@pytest.fixture
def hosts(lab: Lab) -> Iterator[list[Host]]:
    """Hosts that are as before after the test."""
    yield lab.hosts
    lab.repair()


def start(host: Host, program: str, *args: str) -> subprocess.Popen[str]:
    command = [*host.enter(), sys.executable, "-c", program, *args]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def reaches(host: Host, other: Host) -> bool:
    command = [*host.enter(), sys.executable, "-c", REACH, other.address]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def test_a_power_cut_is_silent_and_the_disk_remains(lab: Lab, hosts: list[Host]) -> None:
    first, second, *_ = hosts
    lab.ssh(first, "echo kept > ~/file; sleep 1000 >/dev/null 2>&1 &")
    eventually(first.processes, "it runs")
    with start(second, LISTEN, first.address) as peer:
        assert peer.stdout is not None
        assert peer.stdout.readline() == "connected\n"
        first.power_off()
        assert peer.communicate("\n")[0] == "silent\n"
    assert not first.processes()
    assert not reaches(second, first)
    first.power_on()
    eventually(lambda: reaches(second, first), "it is back")
    assert lab.ssh(first, "cat ~/file; rm ~/file").stdout == "kept\n"


@pytest.mark.parametrize("times", [5, pytest.param(100, marks=pytest.mark.nightly)])
def test_a_host_hangs_while_it_starts_programs(hosts: list[Host], times: int) -> None:
    program = "import subprocess\nprint('up', flush=True)\nwhile True: subprocess.run(['true'])"
    with contextlib.ExitStack() as running:
        for _ in range(4):
            process = running.enter_context(start(hosts[0], program))
            running.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        for _ in range(times):  # some of them are between vfork and exec
            hosts[0].hang()
            hosts[0].wake()


@pytest.mark.parametrize("logins", [True, False])
def test_a_host_that_hangs_is_connected_and_says_nothing(lab: Lab, hosts: list[Host], logins: bool) -> None:
    host, other, *_ = hosts
    with start(host, "print('up', flush=True); input(); print('went on')") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        host.hang(logins)
        eventually(lambda: reaches(other, host), "one can connect")
        assert Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "T"
        if logins:
            assert lab.ssh(host, "hostname").stdout == "h1\n"
        host.wake()
        assert process.communicate("\n")[0] == "went on\n"
    assert lab.ssh(host, "hostname").stdout == "h1\n"


def test_what_a_killed_maker_left_is_removed(lab: Lab) -> None:
    program = "from tests.lab.lab import Lab; import time; Lab(1).start(); print('up', flush=True); time.sleep(1000)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    ) as maker:  # fmt: skip
        assert maker.stdout is not None
        assert maker.stdout.readline() == "up\n"
        maker.kill()
    remove_leftovers()
    left = f"pl{maker.pid}-"
    assert not [name for name in os.listdir("/run/netns") if name.startswith(left)]
    assert left not in Path("/proc/self/mountinfo").read_text()
    assert not list(lab.folder.parent.glob(f"{left}*"))
    assert not [pid for pid in filter(str.isdigit, os.listdir("/proc")) if _belongs(pid, left)]
    assert lab.ssh(lab.hosts[0], "true").returncode == 0


def _belongs(pid: str, left: str) -> bool:
    try:
        return left.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
