"""Commands that wait for a job, or follow it, while hosts are lost, join and leave: they end as the job does."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.conftest import GENEROUS, eventually

from .lab import kill
from .test_joining import STEPS, line, shown

if TYPE_CHECKING:
    from .lab import Client, Host


def submitted(client: Client, hosts: list[str], nodes: str) -> None:
    client.settings(hosts=hosts)
    client.succeeds("submit", "--on", "lab", "--name", "it", "--nnodes", nodes, client.script(ends(client)))
    eventually(lambda: shown(client, "it") == hosts, "it runs")


def ends(client: Client) -> str:
    """A script that ends once there is a file."""
    return STEPS.replace('"end"', f'"{client.folder}/end"')


def waits(client: Client, host: Host, *names: str) -> tuple[subprocess.Popen[str], set[int]]:
    """Start `wait`, until a host waits for the end of a job; returns the processes there that do."""
    before = blocked(host)
    process = client.start("wait", "--on", "lab", *names)
    eventually(lambda: blocked(host) - before, f"{host.name} waits")
    return process, blocked(host) - before


def blocked(host: Host) -> set[int]:
    """The processes on a host that wait for a lock."""
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return {int(fields[5]) for fields in lines if fields[1] == "->"}.intersection(host.processes())


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code, and what was said."""
    _, err = process.communicate(timeout=GENEROUS)
    return process.returncode, "".join(text for text in err.splitlines(True) if not text.endswith("…\n"))


def test_a_job_that_loses_a_host_and_succeeds_has_succeeded_for_who_waits_and_follows(client: Client) -> None:
    submitted(client, ["h1", "h2"], "1:2")
    second = client.lab.hosts[1]
    of_the_job = set(second.processes())
    logs = client.start("logs", "-f", "--all", "--on", "lab", "it")
    line(logs, "h2 1 of 2")
    eventually(lambda: blocked(second), "logs wait there too")
    waiting, _ = waits(client, second, "it")
    kill(set(second.processes()) - of_the_job)  # first: otherwise they may still tell how it ended there
    kill(of_the_job)  # and nothing of a look that comes meanwhile
    line(logs, "h1 0 of 1")
    (client.folder / "end").touch()
    code, said = ended(waiting)
    assert (code, said.startswith("paceline: job it succeeded after ")) == (0, True), said
    code, said = ended(logs)
    assert (code, said.count("cannot reach h2: ")) == (0, 1), said
    assert said.splitlines()[-1].endswith("; lines of its ranks may be missing")


def test_of_several_jobs_one_loses_its_only_host(client: Client) -> None:
    submitted(client, ["h1"], "1")
    client.settings(hosts=["h2"])
    assert client("submit", "--on", "lab", "--name", "other", "script.py").returncode == 0
    client.settings()
    second = client.lab.hosts[1]
    waiting, _ = waits(client, second, "it", "other")
    second.power_off()
    code, said = ended(waiting)
    assert (code, said.startswith("paceline: cannot reach h2: ")) == (2, True), said
    (client.folder / "end").touch()
    code, said = ended(client.start("wait", "--on", "lab", "it"))
    assert code == 0, said


def test_wait_connects_again(client: Client) -> None:
    submitted(client, ["h1"], "1")
    first = client.lab.hosts[0]
    waiting, answering = waits(client, first, "it")
    kill(answering)
    eventually(lambda: blocked(first) - answering, "it waits again")
    (client.folder / "end").touch()
    code, said = ended(waiting)
    assert (code, said.startswith("paceline: job it succeeded after ")) == (0, True), said


def test_wait_goes_on_where_the_job_does(client: Client) -> None:
    submitted(client, ["h1"], "1:2")
    client.settings(hosts=["h1", "h2"])
    waiting, _ = waits(client, client.lab.hosts[0], "it")
    assert client("scaleout", "--on", "lab", "it", "h2").returncode == 0
    eventually(lambda: sorted(shown(client, "it")) == ["h1", "h2"], "both take part")
    assert client("scalein", "--on", "lab", "it", "h1").returncode == 0
    eventually(lambda: shown(client, "it") == ["h2"], "h2 goes on")
    eventually(lambda: not client.lab.hosts[0].processes(), "nothing waits on h1")
    (client.folder / "end").touch()
    code, said = ended(waiting)
    assert (code, said.startswith("paceline: job it succeeded after ")) == (0, True), said
