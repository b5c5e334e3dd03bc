"""The GPUs that ranks get, by each of Slurm's ways to ask for them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .client import Client
    from .cluster import Cluster

WHICH = """
    import os
    print(os.uname().nodename, os.environ["LOCAL_RANK"], os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
"""
OWN = [f"{node} 0 {gpu}" for node in ("n0", "n1") for gpu in (0, 1)]


def lines(user: Client, *flags: str) -> list[str]:
    """What the ranks of a job say."""
    user.paceline("run", "--on", "lab", "--name", "it", *flags, user.script(WHICH))
    said = user.paceline("logs", "--on", "lab", "--all", "it").stdout
    return sorted(re.findall(r"n[0-9] \S+ \S+$", said, re.MULTILINE))


@pytest.mark.parametrize(
    "ask",
    [
        ("--slurm", "gres=gpu:a100:2"),
        ("--slurm", "gpus=4"),
        ("--slurm", "gpus-per-task=2"),
        ("--gpus", "2", "--slurm", "gpus-per-node=a100:2"),
    ],
    ids=" ".join,
)
def test_a_rank_for_each_gpu_sees_its_own(user: Client, ask: tuple[str, ...]) -> None:
    flags = ("--nnodes", "2", "-n", "gpu", "--virtual-local-rank")
    assert lines(user, *ask, *flags) == OWN


def test_ranks_choose_among_the_gpus_by_their_local_rank(user: Client) -> None:
    assert lines(user, "--gpus", "2", "-n", "2") == ["n0 0 0,1", "n0 1 0,1"]


def test_two_jobs_on_a_node_have_gpus_of_their_own(user: Client, cluster: Cluster) -> None:
    hold = "import os, threading; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); threading.Event().wait()"
    script = user.script(hold)
    runs = [user.start("run", "--on", "lab", "--gpus", "1", "--slurm", "nodelist=n0", script) for _ in range(2)]
    assert sorted(run.stdout.readline() for run in runs if run.stdout is not None) == ["0\n", "1\n"]
    (shown,) = [it for it in user.json("top", "node", "--on", "lab") if it["name"] == "n0"]
    assert (shown["devices"], shown["device_count"], shown["allocated_count"]) == ([], 2, 2), shown
    for run in runs:
        run.terminate()
        user.wait(run)


@pytest.mark.parametrize("ask", ["gres=gpu:h100:1", "gpus-per-node=3", "gpus-per-node=h100:1"])
def test_gpus_that_no_node_has_are_refused(user: Client, ask: str) -> None:
    done = user.paceline("submit", "--on", "lab", "--slurm", ask, user.script("pass"), check=False)
    assert done.returncode == 2 and done.stderr.startswith("paceline: Slurm refuses the job: "), done.stderr
    assert done.stderr.count("\n") == 1
