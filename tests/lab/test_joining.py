"""Hosts that come into a job which runs, leave it, and come back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually

if TYPE_CHECKING:
    from .lab import Client, Host

STEPS = """
    import os, pathlib, socket, sys, threading
    print(socket.gethostname(), os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
    while not pathlib.Path("end").exists():
        threading.Event().wait(0.05)
"""


def shown(client: Client, name: str) -> list[str]:
    """The hosts on which the ranks of a job run, all in the same attempt; none while they do not."""
    parts = {host.name: client.status(host, name) for host in client.lab.hosts}
    running = {host: part["attempt"] for host, part in parts.items() if part.get("state") == "RUNNING"}
    return list(running) if len(set(running.values())) == 1 else []


def line(running: subprocess.Popen[str], what: str) -> None:
    assert running.stdout is not None
    while what not in (text := running.stdout.readline()):
        assert text, f"never said: {what}"


def test_a_job_grows_and_shrinks(client: Client) -> None:
    client.settings(hosts=["h1"])
    flags = ("--name", "it", "--nnodes", "1:2", "--sync-mode", "snapshot", "--sync-source", "source", "main.py")
    client.script("import helper", "source/main.py")
    client.script(STEPS.replace('"end"', f'"{client.folder}/end"'), "source/helper.py")
    client.succeeds("submit", "--on", "lab", *flags)
    eventually(lambda: shown(client, "it") == ["h1"], "it runs")
    client.settings()
    done = client("scaleout", "--on", "lab", "it")
    assert (done.returncode, done.stderr) == (0, "paceline: job it: h2 joins\n")
    eventually(lambda: shown(client, "it") == ["h1", "h2"], "both take part")
    done = client("scaleout", "--on", "lab", "it", "h2")
    assert (done.returncode, done.stderr) == (2, "paceline: h2 takes part in job it already; leave it out\n")
    done = client("scalein", "--on", "lab", "it", "--nnodes", "1")
    assert (done.returncode, done.stderr) == (0, "paceline: job it: h2 leaves\n")
    eventually(lambda: shown(client, "it") == ["h1"], "h2 has left")
    client.nothing_runs(2)
    client.succeeds("scaleout", "--on", "lab", "it", "h2")
    eventually(lambda: shown(client, "it") == ["h1", "h2"], "it has come back")
    done = client("scalein", "--on", "lab", "it", "h1", "h2")
    assert done.returncode == 2
    assert "job it needs 1 node, and 0 would be left" in done.stderr
    assert done.stderr.count("\n") == 1
    job = client.json("get", "--on", "lab", "it")
    assert [(rank["node"], rank["state"]) for rank in job["instances"]] == [("h1", "RUNNING"), ("h2", "RUNNING")]
    (client.folder / "end").touch()
    assert client("wait", "--on", "lab", "it").returncode == 0


def grown_from_one(client: Client) -> None:
    """A job that runs on the first host, and may take in the two others."""
    client.settings(hosts=["h1"])
    client.script(STEPS.replace('"end"', f'"{client.folder}/end"'))
    client.succeeds("submit", "--on", "lab", "--name", "it", "--nnodes", "1:3", "script.py")
    eventually(lambda: shown(client, "it") == ["h1"], "it runs")
    client.settings()


def ran_on(client: Client, attempt: int) -> None:
    """Check that the ranks of the first host run, and have run all the time since this attempt."""
    found = client.status(client.lab.hosts[0])
    assert (found["state"], found["attempt"]) == ("RUNNING", attempt)


def ends_well(client: Client) -> None:
    (client.folder / "end").touch()
    client.succeeds("wait", "--on", "lab", "it")


def prepares(host: Host) -> bool:
    """Whether the part of a job on a host has the process that starts its ranks."""
    for pid in host.processes():
        with contextlib.suppress(OSError):
            if b"fork server of job it" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return True
    return False


def test_what_is_left_of_a_job_on_a_host_that_has_joined_is_said(client: Client) -> None:
    grown_from_one(client)
    assert client("scaleout", "--on", "lab", "it", "h2").returncode == 0
    eventually(lambda: shown(client, "it") == ["h1", "h2"], "both take part")
    ends_well(client)
    client.lab.hosts[1].lose_route()
    done = client.succeeds("delete", "--on", "lab", "it")
    assert "paceline: h2 does not answer; what it has of job it is left there\n" in done.stderr


def test_a_host_that_cannot_be_reached_keeps_another_from_joining_and_the_job_goes_on(client: Client) -> None:
    grown_from_one(client)
    assert client("scaleout", "--on", "lab", "it", "h2").returncode == 0
    eventually(lambda: shown(client, "it") == ["h1", "h2"], "both take part")
    assert client("scalein", "--on", "lab", "it", "h2").returncode == 0
    eventually(lambda: not client.lab.hosts[1].processes(), "h2 has left")
    eventually(lambda: shown(client, "it") == ["h1"], "h1 goes on")
    before = client.status(client.lab.hosts[1])
    client.lab.hosts[2].lose_route()
    done = client("scaleout", "--on", "lab", "it")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "paceline: no host joins job it, which goes on; h2 can, if named alone: cannot reach h3: "
    )
    assert done.stderr.count("\n") == 1
    eventually(lambda: not client.lab.hosts[1].processes(), "nothing runs on h2")
    assert client.status(client.lab.hosts[1]) == before
    ran_on(client, 2)
    client.lab.hosts[2].find_route()
    assert client("scaleout", "--on", "lab", "it").returncode == 0
    eventually(lambda: sorted(shown(client, "it")) == ["h1", "h2", "h3"], "all take part")
    ends_well(client)


@pytest.mark.parametrize("wrong", ["full", "taken"])
def test_a_host_that_refuses_keeps_another_from_joining_and_the_job_goes_on(client: Client, wrong: str) -> None:
    grown_from_one(client)
    third = client.lab.hosts[2]
    if wrong == "full":
        third.fill()
    else:
        client.settings(hosts=["h3"])
        client.succeeds("submit", "--on", "lab", "--name", "it", "script.py")
        client.settings(hosts=["h3", "h2", "h1"])
        done = client("scaleout", "--on", "lab", "it", "h2")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "not clear which one: another job it (RUNNING) is on " in done.stderr
        flags = "-H", "h3", "--ssh-root", f"~/{client.root}"
        client.succeeds("stop", *flags, "--now", "it")  # of two jobs of one name, that which has not ended is known
        seen = client.succeeds("get", "--on", "lab", "it")
        assert "; delete it there with paceline delete -H h3 --ssh-root " in seen.stderr
    done = client("scaleout", "--on", "lab", "it", "h2", "h3")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("paceline: no host joins job it, which goes on; h2 can, if named alone: ")
    assert {"full": "h3: ", "taken": "another job named it is on h3; delete that one first"}[wrong] in done.stderr
    eventually(lambda: not client.run_directory(client.lab.hosts[1], "it").exists(), "nothing is left on h2")
    client.settings(hosts=["h1", "h2"])
    ran_on(client, 0)
    ends_well(client)


def test_a_scaleout_that_is_killed_leaves_the_job_as_it_was(client: Client) -> None:
    grown_from_one(client)
    second, third = client.lab.hosts[1:]
    third.hang_logins()
    client.env["PACELINE_LOOK_TIMEOUT"] = "10s"
    scaling = client.start("scaleout", "--on", "lab", "it", "h2", "h3")
    folder = client.run_directory(second, "it")
    eventually((folder / "status.json").exists, "the part on h2 is prepared")
    eventually(lambda: prepares(second), "and its ranks could start")
    scaling.kill()
    scaling.communicate()
    eventually(lambda: not folder.exists(), "nothing is left on h2")
    third.heal_logins()
    client.settings(hosts=["h1", "h2"])
    ran_on(client, 0)
    ends_well(client)


def test_a_host_that_was_killed_comes_back_while_somebody_watches(client: Client) -> None:
    script = client.script(STEPS)
    running = client.start(
        "run", "-H", "h1,h2", "--ssh-root", f"~/{client.root}", "--nnodes", "1:2", "--name", "it", "--tee", "3", script
    )
    line(running, "h2 1 of 2")
    os.kill(client.status(client.lab.hosts[1])["agent"]["pid"], signal.SIGKILL)
    line(running, "h1 0 of 1")
    line(running, "h2 1 of 2")
    (client.folder / "end").touch()
    _, err = running.communicate()
    assert running.returncode == 0, err
    assert "h2 joins\n" in err
    assert "job it succeeded after " in err.splitlines()[-1]


def test_hosts_come_and_go_as_a_script_says(client: Client) -> None:
    script = client.script(STEPS)
    hosts = client.folder / "hosts"
    hosts.write_text("h1:1\n")
    (client.folder / "discover").write_text(f"#!/bin/sh\ncat {hosts}\n")
    (client.folder / "discover").chmod(0o755)
    flags = ("--host-discovery-script", "./discover", "--min-np", "1", "--max-np", "2")
    refused = client("submit", *flags, script)
    assert refused.returncode == 2
    assert "add hosts with paceline scaleout" in refused.stderr
    running = client.start("run", *flags, "--ssh-root", f"~/{client.root}", "--name", "it", "--tee", "3", script)
    line(running, "h1 0 of 1")
    hosts.write_text("h1:1\nh2:1\n")
    line(running, "h2 1 of 2")
    hosts.write_text("h1:1\n")
    line(running, "h1 0 of 1")
    hosts.write_text("h1:1\nh2:1\n")
    line(running, "h2 1 of 2")
    hosts.write_text("h3:1\n")  # one of the others stays until it has come
    line(running, "h3 0 of 1")
    (client.folder / "end").touch()
    _, err = running.communicate()
    assert running.returncode == 0, err


def test_a_host_that_has_another_job_of_the_name_is_told_to_who_watches(client: Client) -> None:
    client.settings(hosts=["h2"])
    assert client("submit", "--on", "lab", "--name", "it", client.script("print()", "other.py")).returncode == 0
    assert client("wait", "--on", "lab", "it").returncode == 0
    hosts, discover = client.folder / "hosts", client.folder / "discover"
    hosts.write_text("h1:1\n")
    discover.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discover.chmod(0o755)
    flags = (
        "--host-discovery-script",
        "./discover",
        "--min-np",
        "1",
        "--max-np",
        "2",
        "--ssh-root",
        f"~/{client.root}",
    )
    running = client.start("run", *flags, "--name", "it", client.script(STEPS), stderr=subprocess.STDOUT)
    line(running, "h1 0 of 1")
    hosts.write_text("h1:1\nh2:1\n")
    line(running, "another job named it is on h2; delete that one first")
    (client.folder / "end").touch()
    running.communicate()
    assert running.returncode == 0


def test_a_script_that_fails_while_the_job_runs_is_told_once(client: Client) -> None:
    how, discover = client.folder / "how", client.folder / "discover"
    discover.write_text(f"#!/bin/sh\necho >> asked\n. {how}\n")
    discover.chmod(0o755)

    def does(command: str) -> None:
        """Set what the script does, in one step: it may run just now."""
        new = how.with_suffix(".new")
        new.write_text(command)
        new.replace(how)

    does("echo h1:1")
    flags = ("--host-discovery-script", "./discover", "--min-np", "1", "--max-np", "3")
    running = client.start(
        "run", *flags, "--ssh-root", f"~/{client.root}", "--name", "it", "--tee", "all", client.script(STEPS),
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    line(running, "h1 0 of 1")

    def said(command: str) -> str:
        """What is said first once the script is asked anew."""
        assert running.stdout is not None
        does(command)
        return running.stdout.readline()

    failed = "paceline: --host-discovery-script ./discover"
    assert said("echo no luck >&2; exit 3") == f"{failed}: exit code 3: no luck; the job goes on\n"
    asked = (client.folder / "asked").stat().st_size
    eventually(lambda: (client.folder / "asked").stat().st_size > asked + 2, "it is asked again")
    assert "'a b' is not a host; write for example node1:2; the job goes on\n" in said("echo a b")
    assert f"{failed} names no host; " in said("true")
    assert "names the hosts again\n" in said("echo h1 slots=1")
    said_now = said("echo h1:2")
    assert said_now == (
        "paceline: h1 has 2 slots now, and the job runs on it alone: stop it and run it again to use that; "
        "the job goes on\n"
    )
    does("echo h1:1; echo h2 slots=2")
    line(running, "checkpoint")  # the job restarts with h2
    assert running.stdout is not None
    shown = sorted(running.stdout.readline() for _ in range(3))
    assert shown == ["[rank 1] h2 1 of 3\n", "[rank 2] h2 2 of 3\n", "h1 0 of 3\n"]
    (client.folder / "end").touch()
    running.communicate()
    assert running.returncode == 0


def test_a_script_that_prints_no_text_is_told_in_a_line(client: Client) -> None:
    discover = client.folder / "discover"
    discover.write_bytes(b"#!/bin/sh\nprintf 'h1:\\377'\n")
    discover.chmod(0o755)
    done = client("run", "--host-discovery-script", "./discover", client.script("print(1)"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "is not a host" in done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--min-np", "2"], "--min-np needs hosts"),
        (["-H", "h1", "--min-np", "1", "--nnodes", "1"], "--nnodes MIN:MAX counts hosts"),
        (["-H", "h1:2", "--min-np", "2", "--max-np", "1"], "--max-np 1 is less than --min-np 2"),
        (["--host-discovery-script", "./none"], "--host-discovery-script ./none: No such file or directory"),
        (["--host-discovery-script", "/bin/false"], "--host-discovery-script /bin/false: exit code 1"),
        (["--host-discovery-script", "/bin/true"], "--host-discovery-script /bin/true names no host"),
        (["-H", "h1", "-np", "0"], "Invalid value for '-np': 0 is less than 1"),
    ],
)
def test_what_cannot_work_is_told_in_a_line(client: Client, flags: list[str], said: str) -> None:
    done = client("run", *flags, client.script("print(1)"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert said in done.stderr


ELASTIC = """
    import socket, threading
    import torch
    import horovod.torch as hvd

    hvd.init()
    state = hvd.elastic.ObjectState(step=0)

    @hvd.elastic.run
    def train(state):
        hosts, first = ",".join(hvd.allgather_object(socket.gethostname())), state.step
        while hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size():
            state.step += 1
            state.commit()
            if hvd.rank() == 0 and state.step == first + 3:
                print("on", hosts, "from", first > 0, flush=True)
            threading.Event().wait(0.05)

    train(state)
"""


@pytest.mark.torch
def test_horovods_elastic_command_goes_on_without_a_host_that_fails_until_it_has_cooled_down(client: Client) -> None:
    script = client.script(ELASTIC)
    (client.folder / "discover").write_text("#!/bin/sh\necho h1:1\necho h2:1\n")
    (client.folder / "discover").chmod(0o755)
    running = client.start(
        "horovodrun", "--min-np", "1", "--max-np", "2", "--host-discovery-script", "./discover",
        "--blacklist-cooldown-range", "5", "60", "--reset-limit", "2", "--ssh-root", f"~/{client.root}",
        "--ssh-python", sys.executable, "--name", "it", script, stderr=subprocess.STDOUT,
    )  # fmt: skip

    def kill_rank(host: int) -> None:
        (rank,) = client.status(client.lab.hosts[host], "it")["ranks"]
        os.kill(rank["pid"], signal.SIGKILL)

    line(running, "on h1,h2 from False")
    kill_rank(1)
    line(running, "attempt 1 of 2")
    line(running, "h2 has failed: while the others are enough, it is left out for 5 s")
    line(running, "on h1 from True")
    line(running, "h2 joins")
    line(running, "on h1,h2 from True")
    kill_rank(1)
    line(running, "attempt 2 of 2")
    line(running, "left out for 10 s")
    line(running, "on h1 from True")
    kill_rank(0)
    assert running.stdout is not None
    assert "rank 0 failed first: killed by SIGKILL" in running.stdout.read()
    assert running.wait() != 0
