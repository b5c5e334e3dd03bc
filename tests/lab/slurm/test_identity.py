"""Which Slurm job is a job's own: other submissions of its script, sites that change comments."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.conftest import eventually

from .client import FOREVER, job, reaches, submit, until

if TYPE_CHECKING:
    from .client import Client
    from .cluster import Cluster


def test_a_script_that_is_submitted_by_hand(user: Client, cluster: Cluster) -> None:
    submit(user, FOREVER)
    reaches(user, "RUNNING")
    (script,) = user.folder.rglob("slurm/it/batch.sh")
    number = cluster.slurm("sbatch", "--parsable", str(script)).strip()
    said = lambda: f"Slurm job {number} is none of the job it" in (script.parent / "slurm.out").read_text()  # noqa: E731
    eventually(said, "it refuses to work")
    eventually(lambda: f"JobId={number} " in (shown := cluster.slurm("scontrol", "show", "job", number))
               and "JobState=FAILED" in shown, "it has ended", 0.1)  # fmt: skip
    assert job(user)["state"] == "RUNNING" and job(user)["external_id"] != number
    assert user.paceline("logs", "--on", "lab", "it").stdout == "here\n"
    user.paceline("stop", "--on", "lab", "it")
    reaches(user, "STOPPED")


def test_a_site_that_changes_comments(user: Client, cluster: Cluster) -> None:
    submit(user, FOREVER, "--slurm", "hold")
    number = job(user)["external_id"]
    cluster.slurm("scontrol", "update", f"jobid={number}", "comment=billing: 7")
    cluster.slurm("scontrol", "release", number)
    reaches(user, "RUNNING")
    submit(user, FOREVER, "--slurm", "hold", name="waits")
    cluster.slurm("scontrol", "update", f"jobid={job(user, 'waits')['external_id']}", "comment=billing: 8")
    user.paceline("stop", "--on", "lab", "it", "waits")
    for name in ("it", "waits"):
        reaches(user, "STOPPED", name)
    eventually(lambda: not cluster.slurm("squeue", "--noheader"), "Slurm has no job any more", 0.1)


def test_attach_finds_the_node_of_a_rank(user: Client, cluster: Cluster) -> None:
    submit(user, FOREVER, "--nnodes", "2")
    reaches(user, "RUNNING")
    nodes = {rank["rank"]: rank["node"] for rank in job(user)["instances"]}
    for rank, node in nodes.items():
        assert user.paceline("attach", "--on", "lab", "it", "-i", str(rank), "--", "uname", "-n").stdout == f"{node}\n"
    assert any(call.startswith("srun ") and "--nodelist=n1" in call for call in cluster.calls), cluster.calls
    user.paceline("stop", "--on", "lab", "it")
    reaches(user, "STOPPED")


def test_a_controller_that_hangs(user: Client, cluster: Cluster) -> None:
    submit(user, FOREVER)
    reaches(user, "RUNNING")
    cluster.break_command("squeue", "exec sleep 600")
    cluster.break_command("scancel", "exec sleep 600")
    eventually(lambda: "squeue does not answer within" in user.paceline("list", "--on", "lab").stderr, "it is said")
    assert job(user)["state"] == "RUNNING"
    stopped = user.paceline("stop", "--on", "lab", "it", check=False)
    assert stopped.returncode == 2 and len(stopped.stderr.splitlines()) == 1, stopped.stderr
    assert "it was tried for 30 s; nothing was stopped; try again" in stopped.stderr
    for name in ("squeue", "scancel"):
        cluster.break_command(name, 'exec "$real" "$@"')
    user.paceline("stop", "--on", "lab", "it")
    reaches(user, "STOPPED")


def test_a_job_that_is_suspended(user: Client, cluster: Cluster) -> None:
    submit(user, FOREVER)
    reaches(user, "RUNNING")
    cluster.slurm("scontrol", "suspend", job(user)["external_id"])
    until(user, lambda it: "Slurm has suspended it" in (it["waiting"] or ""), "it is shown")
    refused = user.paceline("stop", "--on", "lab", "it", check=False)
    assert refused.returncode == 2 and re.fullmatch(
        r".*job it is suspended in Slurm, .*; nothing was stopped; end it with .*\n", refused.stderr
    ), refused
    user.paceline("stop", "--on", "lab", "--now", "it")
    reaches(user, "STOPPED")


def test_attach_to_a_job_that_was_requeued_and_is_held(user: Client, cluster: Cluster) -> None:
    submit(user, FOREVER)
    reaches(user, "RUNNING")
    cluster.slurm("scontrol", "requeuehold", job(user)["external_id"])
    until(user, lambda it: "held" in (it["waiting"] or ""), "it is shown")
    refused = user.paceline("attach", "--on", "lab", "it", "--", "true", check=False)
    assert refused.returncode == 2 and "job it does not run now: Slurm has requeued it" in refused.stderr, refused
    user.paceline("stop", "--on", "lab", "it")
    reaches(user, "STOPPED")
