"""A client that is killed with -9 in the middle of `submit`: no part of the job is left that does not belong to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually

from .test_faults import FOREVER, lines

if TYPE_CHECKING:
    from .lab import Client, Host

# paceline, which dies when it has confirmed so many parts of a job, node 0 last, but has not said that these are all.
DIES = """
    import os, signal, sys
    from paceline.backends.ssh.parts import Parts

    def keep(parts):
        hosts = [*parts.hosts[1:], parts.hosts[0]][: int(os.environ["CONFIRMED"])]
        for host in hosts:
            parts.streams.say(host, "keep")
        parts._answers(hosts)
        os.kill(os.getpid(), signal.SIGKILL)

    Parts.keep = keep
    sys.argv[0] = "paceline"
    from paceline.cli.main import main
    main()
"""
FLAGS = ("--on", "lab", "--rdzv-conf", "join_timeout=3600,keep_alive_interval=1,keep_alive_max_attempt=5")


def dies(client: Client, confirmed: int, *args: str) -> None:
    """Run `submit` until it dies."""
    program = client.folder / client.script(DIES, "dies.py")
    command = [*client.lab.enter(), sys.executable, str(program), "submit", *FLAGS, *args]
    env = {**client.env, "CONFIRMED": str(confirmed)}
    done = subprocess.run(command, env=env, cwd=client.folder, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def processes_of(host: Host, job: str) -> list[int]:
    """The processes of a job on a host, as their arguments or titles name it."""
    found = []
    for pid in host.processes():
        try:
            if f"/jobs/{job}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def test_a_part_that_never_learns_whether_it_is_a_job_ends(client: Client) -> None:
    hosts = client.lab.hosts
    client.settings(hosts=["h1:1", "h2:1", "h3:1"], exact=True)
    client.script(FOREVER)
    # The first host is busy, so that node 0 waits and the job cannot start.
    assert client("submit", "--on", "lab", "--name", "busy", "--gpus", "1", "script.py").returncode == 0
    for confirmed in (0, 2, 3):
        dies(client, confirmed, "--name", f"half-{confirmed}", "--nnodes", "3", "--gpus", "1", "script.py")
    eventually(lambda: not any(processes_of(host, "half") for host in hosts), "no part of it is left")
    eventually(lambda: [job["name"] for job in listed(client)] == ["busy"], "and no trace")
    assert client("stop", "--now", "busy").returncode == 0


def listed(client: Client) -> list[dict[str, object]]:
    return client.json("list", "--on", "lab")


def test_a_job_whose_client_died_at_the_very_end_starts(client: Client) -> None:
    client.script(FOREVER)
    dies(client, 3, "--name", "whole", "--nnodes", "3", "script.py")
    eventually(lambda: [job["state"] for job in listed(client)] == ["RUNNING"], "it runs on all hosts")
    assert client("stop", "--on", "lab", "--now", "whole").returncode == 0


@pytest.mark.parametrize("verb", [("stop",), ("delete", "--force")])
def test_the_rest_of_a_job_that_has_lost_a_part_is_ended(client: Client, verb: tuple[str, ...]) -> None:
    hosts = client.lab.hosts
    client.settings(hosts=["h1:1", "h2:1", "h3:1"], exact=True)
    client.script(FOREVER)
    assert client("submit", "--on", "lab", "--name", "busy", "--gpus", "1", "script.py").returncode == 0
    client.succeeds("submit", *FLAGS, "--name", "rest", "--nnodes", "3", "--gpus", "1", "script.py")
    # Node 0 waits for its device; its part is gone from its host, as if somebody had removed it by hand.
    folder = client.run_directory(hosts[0], "rest")
    eventually((folder / "status.json").exists, "it waits")
    agent = json.loads((folder / "status.json").read_text())["agent"]["pid"]
    os.kill(agent, signal.SIGKILL)
    eventually(lambda: not processes_of(hosts[0], "rest"), "it is gone")
    folder.rename(folder.with_name(".gone"))
    eventually(lambda: [job["state"] for job in listed(client) if job["name"] == "rest"] == ["LOST"], "it is known")
    ended = client.succeeds(*verb, "--on", "lab", "rest")
    assert "gone from its host" not in lines(ended.stderr)[-1]
    eventually(lambda: not any(processes_of(host, "rest") for host in hosts), "nothing of it runs")
    assert client("stop", "--on", "lab", "--now", "busy").returncode == 0
