"""Elastic jobs: Slurm gives as many nodes as it has, and the job goes on with those that are left."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from tests.conftest import eventually
from tests.lab.test_elastic import STEPS

if TYPE_CHECKING:
    from .client import Client
    from .cluster import Cluster

TIMES = "keep_alive_interval=1,keep_alive_max_attempt=20,join_timeout=120"


def job(client: Client, name: str) -> dict[str, Any]:
    return client.json("get", "--on", "slurm", name)


def worlds(client: Client) -> list[int]:
    """The number of ranks that rank 0 has printed, of all lives and attempts."""
    found = sorted((client.folder / "user" / "home").rglob("slurm/it/lives/*/*/it/logs/*/rank-0.log"))
    said = "".join(path.read_text() for path in found)
    return [int(size) for size in re.findall(r"^step \d+ with (\d+) at", said, re.M)]


def states(client: Client) -> list[str]:
    """What the nodes have written of their state."""
    found = (client.folder / "user" / "home").rglob("slurm/it/lives/*/*/it/status.json")
    return [json.loads(path.read_text())["state"] for path in found]


def test_an_elastic_job_goes_on_with_the_nodes_that_are_left(client: Client, cluster: Cluster) -> None:
    end = client.folder / "end"
    flags = ("--nnodes", "2:3", "--rdzv-conf", TIMES, "--max-restarts", "0")
    client.paceline("submit", "--on", "slurm", "--name", "it", *flags, client.script(STEPS), str(end))
    eventually(lambda: worlds(client)[-1:] == [3] and states(client) == ["RUNNING"] * 3, "three nodes work")
    cluster.kill_slurmd("n2", with_job=True)
    cluster.down("n2")
    eventually(lambda: worlds(client)[-1:] == [2], "two nodes work")

    def is_shown() -> bool:
        client.forget()
        found = job(client, "it")
        return (found["state"], found["nodes"], found["attempt"]) == ("RUNNING", 2, 1)

    eventually(is_shown, lambda: f"it runs on two nodes; it is {job(client, 'it')}", 0.3)
    found = job(client, "it")
    assert [(it["rank"], it["state"]) for it in found["instances"]] == [(0, "RUNNING"), (1, "RUNNING")]
    end.touch()
    done = client.paceline("wait", "--on", "slurm", "it", check=False)
    found = job(client, "it")
    assert (done.returncode, found["state"]) == (0, "SUCCEEDED"), found
