"""The lab itself: what is done to its hosts has the effect that it has on real ones, and can be undone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
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
RECEIVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 9000))
print("ready", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 16):
    pass
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 9000)) as connection:
    connection.sendall(bytes(500_000))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
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


def test_hosts_have_a_name_and_a_home_of_their_own(lab: Lab) -> None:
    said = [lab.ssh(host, 'hostname; echo "$HOME"').stdout.split() for host in lab.hosts]
    assert said == [[host.name, str(host.home)] for host in lab.hosts]


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


def test_parts_of_the_network(lab: Lab, hosts: list[Host]) -> None:
    first, second, third = hosts
    lab.part([first], [second, third])
    assert not reaches(first, second)
    assert not reaches(third, first)
    eventually(lambda: reaches(second, third), "they are in one part")
    assert all(lab.ssh(host, "true").returncode == 0 for host in hosts)
    lab.join()
    eventually(lambda: reaches(first, second), "they are in one part again")
    eventually(lambda: reaches(third, first), "and these")
    first.lose_route()
    assert "No route to host" in lab.ssh(first, "true").stderr
    assert reaches(second, first)
    first.find_route()
    assert lab.ssh(first, "true").returncode == 0


def test_a_limit_slows_both_ways(hosts: list[Host]) -> None:
    first, second, *_ = hosts
    first.limit(mbit=4)
    for sender, receiver in ((first, second), (second, first)):
        with start(receiver, RECEIVE, receiver.address) as end:
            assert end.stdout is not None
            assert end.stdout.readline() == "ready\n"
            began = time.monotonic()
            with start(sender, SEND, receiver.address) as begin:
                assert begin.wait() == 0
            assert time.monotonic() - began > 0.5  # 500 kB take 1 s, less what may go at once


def test_a_full_disk_is_full_on_that_host_alone(lab: Lab, hosts: list[Host]) -> None:
    first, second, *_ = hosts
    first.fill()
    write = "head -c 100000 /dev/zero > ~/file"
    assert "No space left" in lab.ssh(first, write).stderr
    assert lab.ssh(second, write).returncode == 0
    first.make_room()
    assert lab.ssh(first, write).returncode == 0


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
