"""`--dry-run` of jobs on hosts: what their ranks get there, variable by variable, and what the hosts would refuse."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest
from tests.variables import CHOSEN, TELL, compare, told

if TYPE_CHECKING:
    from pathlib import Path

    from .lab import Client, Host


def inherited(client: Client, host: Host) -> dict[str, str]:
    """What a process on a host has that ssh has started."""
    command = (*client.lab.enter(), "ssh", host.name, "env", "-0")
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=client.env, cwd=client.folder)
    return dict(line.split("=", 1) for line in done.stdout.split("\0") if line)


def left(client: Client) -> list[Path]:
    """What there is on the hosts of jobs."""
    return [path for host in client.lab.hosts for path in (host.home / client.root).glob("hosts/*/*")]


@pytest.mark.parametrize(
    ("verb", "args"),
    [
        ("submit", ("--nnodes", "2", "-n", "2", "--secret", "TOKEN", "--data", "set:/mnt/set")),
        ("run", ("--nnodes", "2", "-n", "1", "--env", "A=1", "--rdzv-id", "mine")),
        ("run", ("--nnodes", "2", "--framework", "indexed", "-n", "2")),
    ],
)
def test_every_variable_of_every_rank(client: Client, verb: str, args: tuple[str, ...]) -> None:
    client.settings(hosts=["h1", "h2"])
    client.script(TELL)
    with open(client.folder / "paceline.toml", "a") as settings:
        settings.write(f'[volumes]\nset = "{client.folder}"\n')
    client.env["TOKEN"] = "hunter2"
    command = (*args, "--name", "it", "--working-dir", str(client.folder), "script.py")
    done = client.succeeds(verb, "--on", "lab", "--dry-run", *command)
    assert "hunter2" not in done.stdout
    assert not left(client), "the hosts have made nothing"
    shown = json.loads(done.stdout)
    assert shown["job"]["detached"] == (verb == "submit")
    assert client(verb, "--on", "lab", *command).returncode == 0
    if verb == "submit":
        assert client("wait", "--on", "lab", "it").returncode == 0
    real = told(client.folder)
    assert len(real) == len(shown["ranks"]) > 0
    for rank, env in zip(shown["ranks"], real, strict=True):
        has = inherited(client, client.lab.hosts[int(rank["PACELINE_NODE_RANK"])])
        of_ssh = {name: env[name] for name in ("SSH_CLIENT", "SSH_CONNECTION", "PWD") if name in env}
        compare(rank, env, {**has, **of_ssh})
        if "2" in args[1]:
            assert (rank["PACELINE_RANK_KEY"], rank["PACELINE_MAIN_PORT"]) == ("<secret>", CHOSEN)
