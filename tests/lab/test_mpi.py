"""`--framework mpi` over hosts that have no ssh among themselves."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import eventually

if TYPE_CHECKING:
    from .lab import Client

pytestmark = pytest.mark.needs("mpirun")
SUM = """
    import os, socket
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    total = world.allreduce(world.rank)
    print(socket.gethostname(), world.rank, world.size, total, flush=True)
"""
FOREVER = SUM + "    world.Barrier()\n    import time\n    time.sleep(1000)\n"


def get(client: Client, name: str) -> dict[str, Any]:
    return client.json("get", "--on", "lab", name)


def submit(client: Client, script: str, *flags: str) -> str:
    where = ("--env", f"PYTHONPATH={os.pathsep.join(path for path in sys.path if path)}")
    flags = ("--nnodes", "2", "-n", "2", *where, *flags)  # the script imports mpi4py
    client.settings(hosts=["h1", "h2"])
    done = client.succeeds("submit", "--on", "lab", *flags, client.script(script))
    return done.stdout.strip()


def said(client: Client, name: str, rank: int) -> str:
    return client("logs", "--on", "lab", "-i", str(rank), name).stdout


def test_ranks_of_two_hosts_find_each_other(client: Client) -> None:
    name = submit(client, SUM)
    assert client("wait", "--on", "lab", name).returncode == 0
    assert [said(client, name, rank) for rank in range(4)] == [
        f"{host} {rank} 4 6\n" for rank, host in enumerate(["h1", "h1", "h2", "h2"])
    ]
    for host in client.lab.hosts[:2]:
        assert (client.run_directory(host, name) / "agent.log").read_text() == ""


@pytest.mark.parametrize(
    ("victim", "host", "why"),
    [
        ("mpirun", 0, "mpirun was killed by SIGKILL"),
        ("orted", 1, "orted was killed by SIGKILL"),
        pytest.param("agent", 0, "its agent (pid ", marks=pytest.mark.nightly),
        pytest.param("agent", 1, "its agent (pid ", marks=pytest.mark.nightly),
        ("rank", 1, "rank 3: killed by SIGKILL"),
    ],
)
def test_whatever_is_killed_is_named_and_nothing_is_left(client: Client, victim: str, host: int, why: str) -> None:
    name = submit(client, FOREVER)
    eventually(lambda: client.logs(name).count("\n") == 4, "it runs")
    client.are("RUNNING", 1, 2, name=name)
    place = client.lab.hosts[host]
    status = client.status(place, name)
    if victim == "agent":
        pid = status["agent"]["pid"]
    elif victim == "rank":
        pid = status["ranks"][1]["pid"]
    else:
        (pid,) = [pid for pid in place.processes() if _program(pid) == victim]
    os.kill(pid, signal.SIGKILL)
    client.nothing_runs()
    found = get(client, name)
    assert (found["state"], found["error"].startswith(why)) == ("FAILED", True), found
    assert victim != "agent" or f" on {place.name})" in found["error"]


def _program(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""
