"""What single faults of hosts do to a job: it ends or goes on, says which host it was, and leaves nothing anywhere."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually

from .test_elastic import TRAIN

if TYPE_CHECKING:
    from .lab import Client, Host

TIMES = ("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=5,join_timeout=60")
FOREVER = """
    import os, threading
    print("here", os.environ["WORLD_SIZE"], flush=True)
    threading.Event().wait()
"""
NIGHTLY = pytest.mark.nightly


def submitted(client: Client, nodes: str, *args: str) -> None:
    client.succeeds("submit", "--on", "lab", "--name", "it", "--nnodes", nodes, *TIMES, *args)


def state(client: Client, host: Host) -> str:
    """What the agent on a host last said of its part."""
    path = client.run_directory(host, "it") / "status.json"
    return str(json.loads(path.read_text())["state"]) if path.exists() else ""


def said(client: Client, host: Host) -> str:
    """Why the part of the job on a host failed."""
    found = json.loads((client.run_directory(host, "it") / "status.json").read_text())["failure"]
    return str(found["message"])


def log(client: Client, host: Host) -> str:
    """All that the ranks on a host wrote."""
    folder = client.run_directory(host, "it") / "logs"
    return "".join(path.read_text() for path in folder.glob("*/rank-*.log"))


def lines(err: str) -> list[str]:
    """What paceline said; what it does, if that takes long, is left out."""
    return [line for line in err.splitlines() if not line.endswith("…")]


def runs(client: Client, hosts: list[Host], world: int) -> None:
    eventually(
        lambda: all(state(client, host) == "RUNNING" and f"here {world}\n" in log(client, host) for host in hosts),
        "the job runs",
    )


@pytest.mark.parametrize(
    ("fault", "victim"),
    [("hang", 0), ("cut", 1), *(pytest.param(*it, marks=NIGHTLY) for it in [("hang", 1), ("cut", 0)])],
)
def test_a_job_of_fixed_size_loses_a_host(client: Client, fault: str, victim: int) -> None:
    hosts = client.lab.hosts[:2]
    client.settings(hosts=["h1", "h2"])
    lost, left = hosts[victim], hosts[1 - victim]
    submitted(client, "2", client.script(FOREVER))
    runs(client, hosts, 2)
    getattr(lost, fault)()
    eventually(lambda: state(client, left) == "FAILED", "the other one ends")
    assert lost.name in said(client, left)
    assert f"did not answer for {30 if fault == 'hang' else 5} s" in said(client, left)
    eventually(lambda: not left.processes(), "nothing runs there any more")
    if fault == "hang":
        (listed,) = client.json("list", "--on", "lab")
        assert (listed["state"], [rank["node"] for rank in listed["instances"]]) == ("FAILED", ["h1", "h2"])
        assert client("wait", "--on", "lab", "it").returncode == 1
        refused = client("delete", "--on", "lab", "it")
        assert refused.returncode == 2
        assert f"job it has not ended on {lost.name}; " in lines(refused.stderr)[0]
    lost.repair()
    eventually(lambda: not lost.processes(), "nor on the one that is back")
    found = client.json("get", "--on", "lab", "it")
    assert found["state"] == "FAILED"


@pytest.mark.parametrize("victim", [pytest.param(0, marks=NIGHTLY), 1])
def test_a_host_hangs_while_a_job_starts(client: Client, victim: int) -> None:
    hosts = client.lab.hosts[:2]
    client.settings(hosts=["h1", "h2"])
    lost, left = hosts[victim], hosts[1 - victim]
    submitted(client, "2", client.script(FOREVER))
    eventually(lambda: state(client, lost) != "", "it starts")
    lost.hang()
    eventually(lambda: state(client, left) == "FAILED", "the other one gives up")
    assert lost.name in said(client, left)
    eventually(lambda: not left.processes(), "nothing runs there")
    lost.wake()
    eventually(lambda: not lost.processes(), "nor there")


@pytest.mark.parametrize(
    ("nodes", "victim"), [("3", 0), ("2:3", 2), *(pytest.param(*it, marks=NIGHTLY) for it in [("3", 2), ("2:3", 0)])]
)
def test_a_host_dies_before_it_has_joined_the_others(client: Client, nodes: str, victim: int) -> None:
    hosts = client.lab.hosts
    lost, left = hosts[victim], [host for host in hosts if host is not hosts[victim]]
    client.settings(exact=True)
    long = ("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=5,join_timeout=3600")
    submitting = client.start("submit", "--on", "lab", "--name", "it", "--nnodes", nodes, *long, client.script(FOREVER))
    spec = client.run_directory(lost, "it") / "spec.json"

    def suspend() -> bool:
        """Stop its agent before that has connected to anything, or soon after."""
        agents = [pid for pid in lost.processes() if re.search(rb"\0agent\0|: agent of job", cmdline(pid))]
        for pid in agents:
            os.kill(pid, signal.SIGSTOP)
        return bool(agents)

    eventually(suspend, "its agent starts")
    _, err = submitting.communicate()
    assert submitting.returncode == 0, err
    suspend()
    assert spec.exists()
    lost.power_off()
    if nodes == "2:3" and victim:
        eventually(lambda: all("here 2\n" in log(client, host) for host in left), "the others go on")
        assert client("stop", "--on", "lab", "it").returncode in (0, 1)
    else:
        eventually(lambda: all(state(client, host) == "FAILED" for host in left), "the others give up")
        assert lost.name in said(client, left[0])
    eventually(lambda: not any(host.processes() for host in left), "nothing runs there any more")


def cmdline(pid: int) -> bytes:
    """The arguments of a process; none if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("logins", [True, False])
def test_a_host_hangs_while_a_job_is_stopped(client: Client, logins: bool) -> None:
    hosts = client.lab.hosts[:2]
    client.settings(hosts=["h1", "h2"])
    patient = ("--rdzv-conf", "keep_alive_interval=10,keep_alive_max_attempt=2")
    submitted(client, "2", "--grace", "2s", *patient, client.script(FOREVER))
    runs(client, hosts, 2)
    client.hang_up()
    hosts[1].hang(logins=logins)
    done = client("stop", "--on", "lab", "it")
    if logins:  # so it can be told there, and what is suspended is continued
        *continued, line = lines(done.stderr)
        assert done.returncode == 0, done.stderr
        assert line.startswith("paceline: job it stopped after "), done.stderr
        assert any("its agent (pid " in one and "on h2 was suspended; continued" in one for one in continued), (
            done.stderr
        )
    else:
        (line,) = lines(done.stderr)
        assert done.returncode == 1, line
        assert "h2" in line
    eventually(lambda: not hosts[0].processes(), "nothing runs on the other one")
    hosts[1].wake()
    eventually(lambda: not hosts[1].processes(), "nor on the one that is back")


def test_a_job_is_stopped_where_a_host_is_not_reached(client: Client) -> None:
    hosts = client.lab.hosts[:2]
    submitted(client, "2", client.script(FOREVER))
    runs(client, hosts, 2)
    client.hang_up()
    assert hosts[1].sshd is not None
    os.kill(hosts[1].sshd, signal.SIGSTOP)
    seen = client("get", "--on", "lab", "it", "-o", "json")
    found = json.loads(seen.stdout)
    assert (found["state"], [rank["node"] for rank in found["instances"]]) == ("LOST", ["h1"])
    assert (seen.stderr.count("\n"), seen.stderr.startswith("paceline: cannot reach h2: ")) == (1, True), seen.stderr
    assert seen.stderr.endswith("; what it has is not shown\n")
    done = client("stop", "--on", "lab", "it")
    (line,) = lines(done.stderr)
    assert done.returncode == 1, line
    assert line.startswith("paceline: job it stopped after ")
    assert "; not reached everywhere: cannot reach h2: " in line
    eventually(lambda: not any(host.processes() for host in hosts), "h1 has told h2")


def test_a_host_that_waits_for_the_others_loses_its_fork_server(client: Client) -> None:
    first, second, _ = client.lab.hosts
    client.settings(hosts=["h1", "h2"])
    submitted(client, "1:2", client.script(FOREVER))
    runs(client, [first, second], 2)
    second.cut()
    eventually(lambda: state(client, second) == "RESTARTING", "it waits")
    agent = json.loads((client.run_directory(second, "it") / "status.json").read_text())["agent"]["pid"]
    (server,) = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    os.kill(int(server), signal.SIGKILL)
    second.heal()
    eventually(lambda: state(client, second) == "RUNNING", "it takes part again")
    assert client("stop", "--on", "lab", "it").returncode == 0


@pytest.mark.parametrize(
    ("nodes", "victim"), [("1:2", 0), *(pytest.param(*it, marks=NIGHTLY) for it in [("2", 0), ("2", 1), ("1:2", 1)])]
)
def test_an_agent_is_killed_while_a_job_is_stopped(client: Client, nodes: str, victim: int) -> None:
    hosts = client.lab.hosts[:2]
    client.settings(hosts=["h1", "h2"])
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + textwrap.dedent(FOREVER)
    submitted(client, nodes, "--grace", "30s", client.script(stubborn))
    runs(client, hosts, 2)
    stopping = client.start("stop", "--on", "lab", "it")
    folders = [client.run_directory(host, "it") for host in hosts]
    eventually(lambda: all('"stopping"' in (it / "journal.jsonl").read_text() for it in folders), "it is being stopped")
    os.kill(json.loads((folders[victim] / "status.json").read_text())["agent"]["pid"], signal.SIGKILL)
    _, err = stopping.communicate()
    eventually(lambda: not any(host.processes() for host in hosts), "nothing is left")
    found = client.json("get", "--on", "lab", "it")
    assert (found["state"], stopping.returncode) == ("STOPPED", 0), err


@pytest.mark.parametrize(
    ("nodes", "victim"), [("2", 1), *(pytest.param(*it, marks=NIGHTLY) for it in [("2", 0), ("1:2", 0), ("1:2", 1)])]
)
def test_an_agent_is_killed_before_the_others_are_met(client: Client, nodes: str, victim: int) -> None:
    hosts = client.lab.hosts[:2]
    client.settings(hosts=["h1", "h2"])
    running = client.start(
        "submit", "--on", "lab", "--name", "it", "--nnodes", nodes, *TIMES, client.script(FOREVER), stdin=None
    )

    def killed() -> bool:
        for pid in hosts[victim].processes():
            if _is_agent(pid):
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    eventually(killed, "the agent is killed")
    running.communicate()
    left, goes_on = hosts[1 - victim], victim == 1 and nodes == "1:2"
    if running.returncode == 0 and goes_on:
        runs(client, [left], 1)
        assert client("stop", "--on", "lab", "it").returncode == 0
    eventually(lambda: not left.processes(), "nothing runs on the other one")
    if running.returncode == 0:
        found = client.json("get", "--on", "lab", "it")
        assert found["state"] == ("STOPPED" if goes_on else "FAILED")


def _is_agent(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().startswith(b"paceline: agent of job ")
    except OSError:
        return False


@pytest.mark.torch
@pytest.mark.parametrize("victim", [pytest.param(0, marks=NIGHTLY), 1])
def test_a_disk_fills_up_while_a_job_trains(client: Client, victim: int) -> None:
    pytest.importorskip("torch")
    hosts = client.lab.hosts[:2]
    client.settings(hosts=["h1", "h2"], python=sys.executable)
    end = client.folder / "end"  # once it is there, the job ends after the epoch
    submitted(client, "2", client.script(TRAIN), str(end), "1000000")
    eventually(lambda: all("step 20 " in log(client, host) for host in hosts), "it trains")
    full = hosts[victim]
    full.fill()
    done = client("wait", "--on", "lab", "it")
    assert done.returncode != 0
    record = client.json("get", "--on", "lab", "it")
    assert record["state"] == "FAILED"
    assert record["error"].count("\n") == 0
    assert full.name in record["error"]
    assert str(client.run_directory(full, "it")) in record["error"]
    full.make_room()
    end.touch()
    again = client.succeeds("resubmit", "--on", "lab", "it")
    name = again.stdout.strip()
    assert client("wait", "--on", "lab", name).returncode == 0


def test_a_rank_that_cannot_say_why_it_failed_on_a_full_disk(client: Client) -> None:
    host = client.lab.hosts[0]
    client.settings(hosts=["h1"], python=sys.executable)
    waiting = "import time\nprint('begun', flush=True)\nwhile True:\n    print('more' * 1000)\n    time.sleep(0.05)"
    submitted(client, "1", client.script(waiting))
    eventually(lambda: "more" in log(client, host), "it prints")
    host.fill()
    assert client("wait", "--on", "lab", "it").returncode != 0
    error = client.json("get", "--on", "lab", "it")["error"]
    assert f"no space is left on h1 in {client.run_directory(host, 'it')}" in error


def test_a_rank_that_is_stopped_before_it_can_say_that_its_disk_is_full(client: Client) -> None:
    hosts = client.lab.hosts[:2]
    client.settings(hosts=["h1", "h2"], python=sys.executable)
    gone = client.folder / "gone"  # once it is there, the other rank loses its connection
    program = """
import os, sys, time
while os.environ["RANK"] == "0":
    try:
        print("more" * 1000, flush=True)
    except OSError:
        open(sys.argv[1], "w").close()
        time.sleep(1000)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
raise ConnectionError("Connection closed by peer")
"""
    submitted(client, "2", client.script(program), str(gone))
    eventually(lambda: "more" in log(client, hosts[0]), "it prints")
    hosts[0].fill()
    assert client("wait", "--on", "lab", "it").returncode == 1
    error = client.json("get", "--on", "lab", "it")["error"]
    assert f"no space is left on h1 in {client.run_directory(hosts[0], 'it')}" in error
