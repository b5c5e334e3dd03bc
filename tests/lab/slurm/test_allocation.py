"""`paceline run` where its user has nodes already: in the shell of salloc, and in a batch script of his own."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import GENEROUS, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .client import Client
    from .cluster import Cluster

WHO = """
    import os, socket
    print(*(os.environ[name] for name in ("RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE")), socket.gethostname(), flush=True)
"""
FOREVER = """
    import threading
    print("here", flush=True)
    threading.Event().wait()
"""
PACELINE = shlex.join([sys.executable, "-m", "paceline"])
RUN = f"{PACELINE} run"


class Shell:
    """The shell of an salloc, in which lines are typed."""

    def __init__(self, client: Client, *flags: str) -> None:
        command = client.cluster.login.command(["salloc", "--quiet", *flags, "sh"], client.folder)
        self._client = client
        self._process = subprocess.Popen(
            command, env=client.env, cwd=client.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.job = self("echo $SLURM_JOB_ID")[1].strip()

    def type(self, line: str) -> None:
        """Type a line, and wait for nothing."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def __call__(self, line: str) -> tuple[int, str, str]:
        """The exit code, the output and the errors of a line."""
        out, err, end = (self._client.folder / name for name in ("typed.out", "typed.err", "typed.end"))
        end.unlink(missing_ok=True)
        self.type(f"{line} > {out} 2> {err}; echo $? > {end}.new; mv {end}.new {end}")
        eventually(lambda: end.exists() or self._process.poll() is not None, f"{line} ends")
        return int(end.read_text()), out.read_text(), err.read_text()

    def is_alive(self) -> bool:
        """Whether the allocation is still there."""
        return (
            self("true")[0] == 0
            and self._client.cluster.slurm("squeue", "-h", "-j", self.job, "-o", "%T") == "RUNNING\n"
        )

    def close(self) -> None:
        """Give the allocation back."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(GENEROUS)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def salloc(client: Client) -> Iterator[Shell]:
    """An allocation of two nodes."""
    shell = Shell(client, "--nodes=2")
    yield shell
    shell.close()


def test_a_job_has_the_nodes_of_the_allocation(client: Client, salloc: Shell) -> None:
    script = client.script(WHO)
    code, out, err = salloc(f"{RUN} --name it -n 2 --tee 3 {script}")
    assert code == 0, err
    assert sorted(re.findall(r"(\d) 4 2 (n\d)$", out, re.MULTILINE)) == [
        ("0", "n0"),
        ("1", "n0"),
        ("2", "n1"),
        ("3", "n1"),
    ]
    assert not [call for call in client.cluster.calls if call.startswith("sbatch")]
    job = client.json("get", "it")
    assert (job["state"], job["exit_code"], job["nodes"], job["ranks"], job["external_id"]) == (
        "SUCCEEDED", 0, 2, 4, salloc.job,
    )  # fmt: skip
    assert client.paceline("logs", "it", "-i", "3").stdout == "3 4 2 n1\n"
    assert salloc(f"{RUN} {client.script('import sys; sys.exit(7)', 'bad.py')}")[0] == 7
    assert salloc.is_alive()
    client.paceline("delete", "it")


def test_some_nodes_of_the_allocation_or_none(client: Client, salloc: Shell) -> None:
    script = client.script(WHO)
    assert salloc(f"{RUN} --nnodes 1 {script}")[1] == "0 1 1 login\n"
    assert salloc(f"{RUN} --standalone {script}")[1] == "0 1 1 login\n"
    assert salloc(f"{RUN} --on slurm --nnodes 1 {script}")[1] == "0 1 1 n0\n"
    code, out, err = salloc(f"{RUN} --nnodes 3 {script}")
    assert (code, out) == (2, "")
    assert err == (
        f"paceline: --nnodes 3, but the allocation {salloc.job} has 2 nodes; ask for fewer, or make a larger one with"
        " salloc\n"
    )
    code, out, err = salloc(f"{RUN} --on slurm --slurm qos=high {script}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("paceline: --slurm is for a new job of Slurm")
    assert salloc(f"{RUN} --dry-run --name dry {script}")[1].startswith(
        f"srun --jobid={salloc.job} --nodes=2 --ntasks=2 "
    )
    assert salloc(f"env SLURM_HET_SIZE=2 {RUN} {script}")[2].startswith(
        f"paceline: the allocation {salloc.job} is heterogeneous (SLURM_HET_SIZE)"
    )
    assert salloc(f"env PACELINE_ALLOCATION={salloc.job} {RUN} {script}")[1] == "0 1 1 login\n", "not once more"


def test_submit_makes_a_job_of_its_own(client: Client, salloc: Shell) -> None:
    code, out, err = salloc(f"{PACELINE} submit --on slurm --name own {client.script(WHO)}")
    assert (code, out) == (0, "own\n"), err
    client.paceline("wait", "own")
    job = client.json("get", "own")
    assert (job["state"], job["nodes"], job["external_id"] != salloc.job) == ("SUCCEEDED", 1, True)


@pytest.mark.parametrize(
    ("how", "code"), [("stop", 143), ("interrupt", 130), pytest.param("kill", 137, marks=pytest.mark.nightly)]
)
def test_the_allocation_outlives_a_job_that_is_stopped(client: Client, salloc: Shell, how: str, code: int) -> None:
    line = f"{RUN} --name long {client.script(FOREVER)}"
    salloc.type(f"{line} > out 2> err; echo $? > code")
    eventually(lambda: (client.folder / "out").exists() and "here" in (client.folder / "out").read_text(), "it runs")
    assert client.json("get", "long")["state"] == "RUNNING"
    assert client.paceline("attach", "long", "--", "sh", "-c", "echo $RANK").stdout == "0\n"
    found = [number for number in client.processes() if _is_client(number)]
    assert len(found) == 1
    if how == "stop":
        client.paceline("stop", "long")
    else:
        os.kill(found[0], signal.SIGINT if how == "interrupt" else signal.SIGKILL)
    client.paceline("wait", "long", check=False)
    job = client.json("get", "long")
    assert job["state"] == "STOPPED", job
    assert salloc.is_alive()
    assert (client.folder / "code").read_text() == f"{code}\n", (client.folder / "err").read_text()
    assert salloc(f"{RUN} {client.script('pass')}")[0] == 0


def _is_client(number: int) -> bool:
    with contextlib.suppress(OSError):  # it has just ended
        words = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
        return words[1:4] == [b"-m", b"paceline", b"run"]
    return False


def test_the_allocation_is_taken_away(client: Client, salloc: Shell) -> None:
    salloc.type(f"{RUN} --name long {client.script(FOREVER)} > out 2> err")
    eventually(lambda: (client.folder / "out").exists() and "here" in (client.folder / "out").read_text(), "it runs")
    client.cluster.slurm("scancel", salloc.job)
    client.paceline("wait", "long", check=False)
    job = client.json("get", "long")
    assert job["state"] == "STOPPED", job
    assert "its allocation was cancelled in Slurm, not by paceline" in job["error"]


def test_in_a_batch_script(client: Client, cluster: Cluster) -> None:
    script = client.script(WHO)
    for nodes in (1, 2):
        lines = f"#!/bin/sh\n{RUN} --name in-{nodes} --tee 3 {script}\necho code $?\n"
        (client.folder / "own.sh").write_text(lines)
        done = client.sh(f"sbatch --wait --nodes={nodes} --ntasks-per-node=2 --output=own.out own.sh")
        said = (client.folder / "own.out").read_text()
        assert done.returncode == 0, done.stderr + said
        assert len(re.findall(rf"\d {2 * nodes} {nodes} n\d$", said, re.MULTILINE)) == 2 * nodes, said
        assert said.endswith("code 0\n")


def test_srun_that_starts_a_job_on_each_node(client: Client, salloc: Shell) -> None:
    code, out, err = salloc(f"srun {RUN} -n 2 --tee 3 {client.script(WHO)}")
    assert code == 0, err
    assert sorted(re.findall(r"(\d 2 1 n\d)$", out, re.M)) == ["0 2 1 n0", "0 2 1 n1", "1 2 1 n0", "1 2 1 n1"]
    assert err.count("srun has started this on 2 nodes, and each of them trains alone; leave srun out") == 1, err


def test_tasks_that_no_job_can_have(client: Client) -> None:
    shell = Shell(client, "--nodes=2", "--ntasks=3")
    code, out, err = shell(f"{RUN} {client.script(WHO)}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "are not the same number on each node; say how many ranks" in err
    assert shell(f"{RUN} -n 1 {client.script(WHO)}")[1] == "0 2 2 n0\n"
    shell.close()
