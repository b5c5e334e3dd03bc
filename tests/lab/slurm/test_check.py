"""`paceline check` on a Slurm cluster: what it tries, what it finds, and that nothing of it is left."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from .client import Client
    from .cluster import Cluster


def target(client: Client, settings: str = "") -> None:
    (client.folder / "paceline.toml").write_text(f'[targets.lab]\nbackend = "slurm"\n{settings}')


def check(client: Client, code: int, *before: str, **env: str) -> dict[str, Any]:
    """The rows of each section by their labels, and the findings by their levels, each as a line."""
    done = client("check", "--on", "lab", "-o", "json", python=(*before, sys.executable), env=env)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr + done.stdout
    report = json.loads(done.stdout)
    report["sections"] = {title: dict(rows) for title, rows in report["sections"].items()}
    lines: dict[str, list[str]] = {"error": [], "warning": []}
    for it in report["findings"]:
        lines[it["level"]].append(f"{it['where']} {it['what']}; {it['do']}")
    nothing_is_left(client, "start" in report["sections"]["Short job"])
    return {**report["sections"], **lines}


def nothing_is_left(client: Client, was_submitted: bool) -> None:
    """No job in Slurm's queue, none in paceline's list, and no file."""
    root = client.folder / "user" / "home" / ".local" / "state" / "paceline"
    eventually(lambda: not list(root.glob("slurm/.*")) and not list(root.glob("slurm/*")), "the folder is removed", 0.1)
    if was_submitted:
        eventually(
            lambda: "paceline" not in client.cluster.slurm("squeue", "--noheader", "-o", "%j"), "it is cancelled", 0.1
        )


def test_a_healthy_cluster(client: Client) -> None:
    target(client)
    found = check(client, 0)
    assert found["error"] == []
    slurm, job = found["Slurm"], found["Short job"]
    assert slurm["commands"].endswith("on PATH")
    assert slurm["version"].startswith("slurm")
    assert slurm["munge"].startswith("answers at ")
    assert slurm["controller"] == "Slurmctld(primary) at ctl is UP"
    assert slurm["accounting"].startswith("off; ")
    assert slurm["partition main (default)"] == "up, 3 of 3 nodes up, time limit infinite"
    assert slurm["used"] == "main, the default"
    assert "2 nodes of main" in job["submit"]
    assert job["start"].endswith("on n0, n1")
    assert job["shared disk"].startswith("n0, n1 see ")
    assert "runs paceline" in job["Python"]
    assert job["GPUs"].startswith("1 granted")
    assert job["names"] == "n0, n1 resolve all names of the job's nodes"
    for route in ("n0 → n1", "n1 → n0"):
        assert "ms there and back" in job[route]
        assert "Mbit/s" in job[route]
    assert client.json("list", "--on", "lab", "-A") == []
    shown = client.paceline("check", "--on", "lab").stdout
    assert all(label in shown for label in (*slurm, *job))


def test_a_partition_that_does_not_exist(client: Client) -> None:
    target(client, 'slurm = {partition = "nowhere"}\n')
    found = check(client, 1)
    assert found["error"] == [
        "partition nowhere does not exist; there are main, urgent, short; set slurm = {partition = …} in [targets.lab]"
        " to one that exists"
    ]
    assert found["Short job"] == {"submit": "not tried: there is no such partition"}


def test_a_partition_with_a_short_time_limit(client: Client) -> None:
    target(client, 'slurm = {partition = "short", gpus = 1}\n')
    found = check(client, 0)
    assert found["Slurm"]["used"] == "short, as the target says"
    assert "of short, for 1 min at most" in found["Short job"]["submit"]
    assert found["Short job"]["start"].endswith("on n0, n1")


@pytest.mark.parametrize("node", [pytest.param("n0", marks=pytest.mark.nightly), "n1"])
def test_a_root_that_one_node_does_not_see(client: Client, cluster: Cluster, node: str) -> None:
    target(client)
    root = client.folder / "user" / "home"
    with cluster.hidden(node, root):
        found = check(client, 1)
    assert len(found["error"]) == 1, found
    (error,) = found["error"]
    assert error.startswith(f"{node} does not see {root}")
    assert "set root = " in error
    assert node in found["Short job"]["shared disk"]


def test_munge_is_down(client: Client, cluster: Cluster) -> None:
    target(client)
    cluster.kill_munged()
    found = check(client, 1)
    (error,) = found["error"]
    assert error.startswith("munge does not answer at ")
    assert "systemctl status munge" in error
    assert found["Slurm"]["controller"] == "not tried"
    assert found["Short job"]["submit"].startswith("not tried: munge")


def test_the_controller_is_down(client: Client, cluster: Cluster) -> None:
    target(client)
    cluster.kill_slurmctld()
    found = check(client, 1)
    (error,) = found["error"]
    assert error.startswith("Slurm's controller does not answer: ")
    assert found["Slurm"]["munge"].startswith("answers")
    assert found["Short job"]["submit"].startswith("not tried: Slurm's controller")


def test_a_name_that_does_not_resolve(client: Client, cluster: Cluster) -> None:
    target(client)
    with cluster.unnamed("n1"):
        found = check(client, 0)
    assert found["error"] == []
    assert any("n0 cannot resolve the name n1" in line and "/etc/hosts" in line for line in found["warning"])
    assert "n0 cannot resolve n1" in found["Short job"]["names"]
    assert "ms there and back" in found["Short job"]["n0 → n1"], "its address is tried"


@pytest.mark.needs("iptables")
def test_a_firewall_between_nodes(client: Client, cluster: Cluster) -> None:
    target(client)
    with cluster.blocked("n0", "n1"):
        found = check(client, 1)
    (error,) = found["error"]
    assert error.startswith("n0 cannot connect to n1 at 10.78.0.11: connection refused; ")
    assert "firewall" in error
    assert found["Short job"]["n0 → n1"] == "connection refused"
    assert "ms there and back" in found["Short job"]["n1 → n0"]


def test_a_job_that_does_not_start_is_cancelled(client: Client, cluster: Cluster) -> None:
    target(client)
    cluster.slurm("sbatch", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap", "sleep 300")
    eventually(lambda: set(cluster.states().values()) == {"allocated"}, "all nodes are in use", 0.1)
    found = check(client, 0, PACELINE_ACT_TIMEOUT="5s")
    (warning,) = found["warning"]
    assert "did not start within 20 s, and was cancelled: " in warning
    assert "(Slurm: Resources)" in warning or "(Slurm: Priority)" in warning
    assert found["Short job"]["cleaned up"].startswith("the job is not in Slurm's queue")


def test_an_interrupted_check_leaves_nothing(client: Client, cluster: Cluster) -> None:
    target(client)
    cluster.slurm("sbatch", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap", "sleep 300")
    eventually(lambda: set(cluster.states().values()) == {"allocated"}, "all nodes are in use", 0.1)
    it = client.start("check", "--on", "lab")
    eventually(
        lambda: "paceline-check" in cluster.slurm("squeue", "--noheader", "-o", "%j"), "the short job waits", 0.1
    )
    it.send_signal(signal.SIGINT)
    it.communicate()
    assert it.returncode not in (0, 1)
    nothing_is_left(client, was_submitted=True)


def test_no_commands_of_slurm(client: Client, tmp_path: Path) -> None:
    target(client)
    for program in ("sh", "setsid"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    found = check(client, 1, "env", f"PATH={tmp_path}")
    assert found["error"][0].startswith("Slurm's commands are missing here: sbatch, ")
    assert "ssh = " in found["error"][0]
