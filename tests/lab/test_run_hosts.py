"""`paceline run` on hosts: the screen of a local run, and nothing that outlives it; and submits that are killed."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from .lab import Client

HELLO = """
    import os, socket, sys
    print("hello from", socket.gethostname(), os.environ["RANK"], os.environ["WORLD_SIZE"])
"""
FOREVER = """
    import os, threading
    print("here", os.environ["RANK"], flush=True)
    threading.Event().wait()
"""


def where(client: Client, hosts: str) -> tuple[str, ...]:
    return ("-H", hosts, "--ssh-root", f"~/{client.root}")


def folders(client: Client) -> list[Path]:
    """All that jobs have left on the hosts."""
    return [
        path for host in client.lab.hosts for path in (host.home / client.root / "hosts" / host.name / "jobs").glob("*")
    ]


def nothing_is_left(client: Client) -> bool:
    return not any(host.processes() for host in client.lab.hosts) and not folders(client)


def test_hosts_have_as_many_ranks_as_slots(client: Client) -> None:
    done = client.succeeds("run", *where(client, "h1:2,h2:1"), "--name", "mine", client.script(HELLO))
    assert done.stdout == "hello from h1 0 3\n"
    first, last = done.stderr.splitlines()[-2:]
    assert first == "paceline: job mine: 3 ranks on h1, h2; see it with: paceline get mine", "it is noted where it is"
    assert "SUCCEEDED" in client.succeeds("get", "mine").stdout
    assert last.startswith("paceline: job mine succeeded after ")
    done = client("run", *where(client, "h1:2,h2:1"), "--tee", "3", client.script(HELLO))
    assert sorted(done.stdout.splitlines()) == [
        "[rank 1] hello from h1 1 3",
        "[rank 2] hello from h2 2 3",
        "hello from h1 0 3",
    ]
    shown = client("get", *where(client, "h1,h2"), "mine", "-o", "json")
    assert [rank["node"] for rank in json.loads(shown.stdout)["instances"]] == ["h1", "h1", "h2"]
    logs = client("logs", *where(client, "h1,h2"), "mine", "-i", "2")
    assert logs.stdout == "hello from h2 2 3\n"


@pytest.mark.parametrize(
    ("flags", "world"),
    [
        (["-H", "h1:2,h2:2", "-np", "3"], "3 ['h1', 'h1', 'h2']"),
        (["-H", "h1:2,h2:2", "-np", "2"], "2 ['h1', 'h1']"),
        (["-H", "h1:2,h2:2", "-n", "1"], "2 ['h1', 'h2']"),
        (["-H", "h1:2,h2:2", "--nnodes", "1"], "2 ['h1', 'h1']"),
        (["--hostfile", "hosts"], "3 ['h1', 'h2', 'h2']"),
        (["--on", "lab", "-n", "2"], "2 ['h1', 'h1']"),
    ],
)
def test_which_hosts_take_part(client: Client, flags: list[str], world: str) -> None:
    (client.folder / "hosts").write_text("# the lab\nh1\n\nroot@h2 slots=2  # the large one\n")
    root = [] if "--on" in flags else ["--ssh-root", f"~/{client.root}"]
    script = client.script("import os; print(os.environ['WORLD_SIZE'])")
    done = client.succeeds("run", *flags, *root, "--name", "it", script)
    nodes = [host.name for host in client.lab.hosts for _ in client.status(host).get("ranks", [])]
    assert f"{done.stdout.strip()} {nodes}" == world


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-H", "h1:x"], "-H 'h1:x': 'h1:x' is not a host; write for example node1:2"),
        (["-H", "h1,h1"], "-H 'h1,h1': h1 is named twice; leave one out"),
        (["--hostfile", "twice"], "--hostfile twice:3: h1 is named twice; leave one out"),
        (
            ["-H", "h1,h2", "--rdzv-endpoint", "h1:29400"],
            "--rdzv-endpoint: hosts that ssh reaches find each other by themselves",
        ),
        (["-H", "h1,h2", "--framework", "mpi", "--nnodes", "1:2"], "--nnodes '1:2': with --framework mpi"),
        (["-H", "h1,h2", "--framework", "mpi", "--min-np", "1"], "--min-np: with --framework mpi"),
        (["-H", "h1:0"], "has no slot"),
        (["-H", "h1", "--on", "lab"], "-H and --on both say where"),
        (["-H", "h1", "--hostfile", "x"], "-H and --hostfile both say where"),
        (["--hostfile", "nowhere"], "--hostfile nowhere: No such file or directory"),
        (["-H", "h1:2,h2:2", "-np", "5"], "-np 5, but the hosts have 4 slots"),
        (["-H", "h1", "--nnodes", "2"], "--nnodes 2, but 1 hosts are named"),
        (["-p", "22"], "--ssh-port is for hosts; name some with -H, --hostfile or --on"),
        (["-H", "h1", "--output-filename", "out"], "--output-filename: the logs stay on the hosts"),
        (["-H", "h1", "--working-dir", "/not/there"], "h1: no folder /not/there to run in"),
        (["-H", "h1", "--ssh-python", "/no/python3"], "no Python on h1"),
    ],
)
def test_what_cannot_work_is_told_in_a_line(client: Client, flags: list[str], said: str) -> None:
    (client.folder / "twice").write_text("h1\n# the large one\nh1 slots=2\n")
    done = client("run", "--ssh-root", f"~/{client.root}", *flags, client.script("print(1)"))
    lines = [line for line in done.stderr.splitlines() if not line.endswith("…")]  # what it does, if that takes long
    assert (done.returncode, done.stdout, len(lines)) == (2, "", 1), done.stderr
    assert said in lines[0]
    eventually(lambda: nothing_is_left(client), "nothing is left on the hosts")


@pytest.mark.parametrize("node", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_an_agent_that_is_killed_ends_the_run(client: Client, node: int) -> None:
    running = client.start("run", *where(client, "h1,h2"), "--name", "it", "--tee", "3", client.script(FOREVER))
    assert running.stdout is not None
    for _ in range(2):
        assert "here" in running.stdout.readline()
    status = json.loads((client.run_directory(client.lab.hosts[node], "it") / "status.json").read_text())
    os.kill(status["agent"]["pid"], signal.SIGKILL)
    _, err = running.communicate()
    assert running.returncode == 1
    gone = ("node 0 (h1), which coordinates the job, is gone", "node 1 (h2) is gone")[node]
    assert err.splitlines()[-1].startswith(f"paceline: {gone}")


def test_an_agent_that_is_killed_alone_is_told(client: Client) -> None:
    running = client.start("run", *where(client, "h1"), "--name", "it", client.script(FOREVER))
    assert running.stdout is not None
    assert "here" in running.stdout.readline()
    status = json.loads((client.run_directory(client.lab.hosts[0], "it") / "status.json").read_text())
    os.kill(status["agent"]["pid"], signal.SIGKILL)
    _, err = running.communicate()
    assert running.returncode == 137
    assert f"the job's agent on h1 (pid {status['agent']['pid']}) ended without a report (SIGKILL)" in err


def test_a_host_that_is_cut_off_is_told_and_the_job_ends(client: Client) -> None:
    client.env["PACELINE_RECONNECT_TIMEOUT"] = "2s"
    running = client.start("run", *where(client, "h1,h2"), "--name", "it", "--tee", "3", client.script(FOREVER))
    assert running.stdout is not None
    for _ in range(2):
        assert "here" in running.stdout.readline()
    client.lab.hosts[1].cut()
    _, err = running.communicate()
    assert running.returncode == 1
    assert "h2" in err
    assert "its output is no longer received" in err
    assert "exit status" not in err
    client.lab.hosts[1].heal()
    client.nothing_runs()


def test_two_names_of_one_machine_are_refused(client: Client) -> None:
    first = client.lab.hosts[0]
    for extra in ((), ("--dry-run",)):
        done = client("run", "-H", f"h1:1,{first.address}:3", *extra, client.script("print()"))
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == (
            f"paceline: h1 and {first.address} are the same machine; name it once, with all its slots: h1:4"
        )
