"""Arrays: one submission, and a job of its own for each index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.conftest import eventually

if TYPE_CHECKING:
    from .client import Client
    from .cluster import Cluster

TASK = """
    import os, threading
    task = os.environ["SLURM_ARRAY_TASK_ID"]
    print("task", task, "of", os.environ["SLURM_ARRAY_TASK_COUNT"], *(
        os.environ[name] for name in ("PACELINE_PROCESS_INDEX", "PACELINE_PROCESS_NUM")), flush=True)
    if task == "2":
        raise SystemExit(3)
    if task == "3":
        threading.Event().wait()
"""


def listed(client: Client) -> dict[str, Any]:
    client.forget()
    jobs = client.json("list", "--on", "slurm")
    return {job["name"]: job for job in jobs}


def test_each_task_is_a_job(client: Client, cluster: Cluster) -> None:
    flags = ("--array", "0-3", "-n", "2", "--framework", "indexed", "--start-method", "exec")
    done = client.paceline("submit", "--on", "slurm", "--name", "it", *flags, client.script(TASK))
    assert done.stdout == "it-0\n"
    assert "an array of 4 jobs: it-0, it-1, it-2, it-3" in done.stderr
    assert len([call for call in cluster.calls if call.startswith("sbatch --parsable")]) == 1
    jobs = listed(client)
    assert sorted(jobs) == ["it-0", "it-1", "it-2", "it-3"]
    array = {job["external_id"].partition("_")[0] for job in jobs.values()}
    assert len(array) == 1
    assert [jobs[f"it-{task}"]["external_id"].partition("_")[2] for task in range(4)] == ["0", "1", "2", "3"]
    assert client.paceline("wait", "it-0", "it-1").returncode == 0
    assert client.paceline("wait", "it-2", check=False).returncode == 3
    said = client.paceline("logs", "--all", "it-1").stdout.splitlines()
    assert sorted(line[-15:] for line in said) == ["task 1 of 4 0 2", "task 1 of 4 1 2"]
    eventually(lambda: listed(client)["it-3"]["state"] == "RUNNING", "the last one runs", 0.3)
    client.paceline("stop", "it-3")
    states = {name: job["state"] for name, job in listed(client).items()}
    assert states == {"it-0": "SUCCEEDED", "it-1": "SUCCEEDED", "it-2": "FAILED", "it-3": "STOPPED"}
    client.paceline("delete", *states)
    assert listed(client) == {}


def test_tasks_that_wait_are_stopped_alone(client: Client, cluster: Cluster) -> None:
    flags = ("--array", "1,3%1", "--slurm", "hold")
    client.paceline("submit", "--on", "slurm", "--name", "it", *flags, client.script("pass"))
    jobs = listed(client)
    assert {name: job["state"] for name, job in jobs.items()} == {"it-1": "PENDING", "it-3": "PENDING"}
    client.paceline("stop", "it-1")
    number = jobs["it-3"]["external_id"].partition("_")[0]
    assert cluster.slurm("squeue", "--noheader", "--array", "--format=%K").split() == ["3"]
    cluster.slurm("scontrol", "release", number)
    client.paceline("wait", "it-3")
    assert {name: job["state"] for name, job in listed(client).items()} == {"it-1": "STOPPED", "it-3": "SUCCEEDED"}


def test_many_tasks_are_stopped_together(client: Client, cluster: Cluster) -> None:
    forever = client.script("import threading; threading.Event().wait()")
    client.paceline("submit", "--on", "slurm", "--name", "it", "--array", "0-3%2", forever)
    eventually(lambda: [job["state"] for job in listed(client).values()].count("RUNNING") == 2, "two run", 0.3)
    client.paceline("stop", *listed(client))
    assert {job["state"] for job in listed(client).values()} == {"STOPPED"}
    eventually(lambda: not cluster.slurm("squeue", "--noheader"), "Slurm has none any more", 0.1)
