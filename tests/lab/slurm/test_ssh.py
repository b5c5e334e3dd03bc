"""A cluster whose login node is reached by ssh: a real sshd there, and a home that only it and the nodes have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually
from tests.lab.lab import kill

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .client import Client
    from .cluster import Cluster

PORT = 2222  # in the login machine's own network


@pytest.fixture
def user(client: Client, cluster: Cluster) -> Iterator[Client]:
    """A user elsewhere: without Slurm's commands, and with a home of his own on the cluster."""
    folder = client.folder / "ssh"
    home = folder / "home"
    home.mkdir(parents=True)
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd insists on it
    (folder / "sshd_config").write_text(
        f"ListenAddress {cluster.login.address}\nPort {PORT}\nHostKey {folder}/host_key\n"
        f"AuthorizedKeysFile {folder}/key.pub\nStrictModes no\nUsePAM no\nPidFile none\nPasswordAuthentication no\n"
        f"SetEnv HOME={home} PATH={cluster.env['PATH']} SLURM_CONF={cluster.env['SLURM_CONF']}\n"
    )
    (folder / "bin").mkdir()
    options = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    ssh = folder / "bin" / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh {options} -o HostName={cluster.login.address} "$@"\n')
    ssh.chmod(0o755)
    log = folder / "sshd.log"
    with open(log, "wb") as output:
        command = cluster.login.command(["/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd_config")])
        sshd = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    eventually(lambda: "Server listening" in log.read_text(), "one can log in")
    client.env.pop("SLURM_CONF")
    client.env.update(PATH=f"{folder}/bin:/usr/bin:/bin")
    client.env["XDG_RUNTIME_DIR"] = str(cluster.folder)  # the path of a socket is short
    settings = {"ssh": "login1", "port": PORT, "identity_file": str(folder / "key"), "python": sys.executable}
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    (client.folder / "paceline.toml").write_text(f'[targets.lab]\nbackend = "slurm"\n{lines}')
    try:
        yield client
    finally:
        kill([pid for pid in cluster.login.processes() if pid != sshd.pid])
        sshd.terminate()
        sshd.wait()


def test_a_job_from_elsewhere(user: Client) -> None:
    script = user.script("import os, helper; print(helper.WORD, os.environ['SECRET'], os.getcwd(), flush=True)")
    (user.folder / "helper.py").write_text("WORD = 'sent'\n")
    env = {**user.env, "SECRET": "hidden"}
    flags = ("--nnodes", "2", "--sync-mode", "snapshot", "--secret", "SECRET")
    user.paceline("submit", "--on", "lab", "--name", "it", *flags, script, env=env)
    assert user.paceline("wait", "it").returncode == 0
    home = user.folder / "ssh" / "home"
    said = user.paceline("logs", "it").stdout
    assert said == f"sent hidden {home}/.local/state/paceline/slurm/it/code/it\n"
    shown = user.json("get", "it")
    assert (shown["state"], shown["code"]["mode"]) == ("SUCCEEDED", "snapshot")
    done = user.paceline("run", "--on", "lab", user.script("raise SystemExit(7)"), check=False)
    assert done.returncode in (2, 7), done.stderr
    refused = user.paceline("submit", "--on", "lab", "--slurm", "partition=none", *flags, script, check=False, env=env)
    assert refused.returncode == 2 and refused.stderr.startswith("paceline: login1: Slurm refuses the job: ")
    user.paceline("delete", "it")
