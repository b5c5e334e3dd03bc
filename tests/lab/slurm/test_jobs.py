"""Jobs on a Slurm cluster, from the script to the states that its users see."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually

from .client import FOREVER, job, reaches, submit, until

if TYPE_CHECKING:
    from .client import Client
    from .cluster import Cluster


def test_the_script_is_printed_whole_and_its_options_reach_slurm(user: Client, cluster: Cluster) -> None:
    (user.folder / "paceline.toml").write_text(
        '[targets.lab]\nbackend = "slurm"\n'
        'slurm = {partition = "main", nice = 7, exclusive = "user"}\n[targets.plain]\nbackend = "slurm"\n'
    )
    flags = ("--nnodes", "2", "--gpus", "1", "--cpus", "3", "--memory", "1Gi", "--time-limit", "2h")
    shown = user.paceline(
        "submit", "--on", "lab", "--dry-run", "--slurm", "mail-user=a b,c=d@e", "--slurm", "hold", *flags,
        user.script("pass"),
    ).stdout  # fmt: skip
    assert cluster.slurm("squeue", "--noheader") == "", "a dry run submits nothing"
    for line in (
        "--nodes=2", "--gres=gpu:1", "--mem=1024M", "--time=0-02:00:00", "--partition=main", "--nice=7", "--hold",
        '--mail-user="a b,c=d@e"', "--exclusive=user", "--cpus-per-task=3", "--requeue",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in shown, line
    assert re.search(r"^srun .*slurm \"\$job\" &$", shown, re.M)
    submit(user, FOREVER, "--slurm", "hold", "--slurm", "begin=now+1hour", *flags)
    found = job(user, "it")
    assert found["state"] == "PENDING" and "scontrol release" in found["waiting"], found["waiting"]
    kept = cluster.slurm("scontrol", "show", "job", found["external_id"])
    for text in ("NumNodes=2", "Nice=7", "TimeLimit=02:00:00", "Requeue=1", "Partition=main", "CPUs/Task=3"):
        assert text in kept, text
    user.paceline("stop", "it")
    reaches(user, "STOPPED")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--slurm", "nodes=2"), r"--slurm: nodes is not for --slurm: give --nnodes"),
        (("--slurm", "partition=none"), r"Slurm refuses the job: .*invalid partition"),
        (("--nnodes", "9"), r"Slurm refuses the job: .*node"),
        (("--gpus", "7"), r"Slurm refuses the job: "),
        (("--image", "x"), r"--image: it is not said what runs containers there"),
        (("--priority", "3"), r"--priority: Slurm computes the priority"),
        (("--devices", "0,1"), r"--devices: Slurm chooses the devices"),
        (("--master-addr", "n0", "--nnodes", "2"), r"--master-addr: the nodes find each other"),
        (("--working-dir", "/nowhere/at/all"), r"no folder /nowhere/at/all here"),
    ],
)
def test_what_is_refused_is_refused_before_anything_is_there(
    user: Client, cluster: Cluster, flags: tuple[str, ...], why: str
) -> None:
    for dry in ((), ("--dry-run",)):
        done = user.paceline("submit", "--on", "lab", *dry, *flags, user.script("pass"), check=False)
        assert done.returncode == 2 and done.stdout == "", done.stderr
        assert re.fullmatch(f"paceline: (?i:{why}).*\n", done.stderr), done.stderr
    assert cluster.slurm("squeue", "--noheader") == ""
    assert user.paceline("list", "--on", "lab", "-o", "json").stdout == "[]\n"


def test_gpus_are_those_that_slurm_grants(user: Client) -> None:
    script = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('SLURM_JOB_GPUS'))"
    submit(user, script, "--slurm", "gres=gpu:2")
    user.paceline("wait", "it")
    assert user.paceline("logs", "it").stdout == "0,1 0,1\n"
    shown = user.json("top", "node", "--on", "lab")
    assert [(node["name"], node["partitions"], node["device_count"]) for node in shown] == [
        (f"n{number}", ["main", "short", "urgent"], 2) for number in range(3)
    ]


def test_nodes_with_different_numbers_of_gpus(user: Client) -> None:
    script = "import os; print(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'CUDA_VISIBLE_DEVICES')))"
    submit(user, script, "--nnodes", "2", "--slurm", "gpus=3", "-n", "gpu")
    user.paceline("wait", "it")
    said = user.paceline("logs", "--all", "it").stdout
    assert sorted(re.findall(r"[0-9] 3 [0-9,]+$", said, re.M)) == ["0 3 0,1", "1 3 0,1", "2 3 0"]


def test_verbs_that_slurm_lacks_say_what_to_do_instead(user: Client) -> None:
    submit(user, "pass")
    user.paceline("wait", "it")
    for verb, said in {
        ("resubmit", "--on", "local", "it"): "lab: jobs do not move between a Slurm cluster and other machines; submit",
        (
            "scaleout",
            "--on",
            "lab",
            "it",
        ): "lab: its jobs keep their nodes: Slurm adds none to a running job, and takes none away; stop",
        ("tensorboard", "--on", "lab", "it"): "lab: it starts no TensorBoard later; submit with --tensorboard, or type",
    }.items():
        done = user.paceline(*verb, check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith(f"paceline: {said} ")
    shown = user.paceline("top", "job", "--on", "lab", "it")
    assert shown.stderr == "", "it does not run"


def test_why_a_job_waits(user: Client, cluster: Cluster) -> None:
    submit(user, FOREVER, "--nnodes", "3", "--slurm", "exclusive", name="first")
    assert reaches(user, "RUNNING", "first")["queue"] == "main"
    submit(user, FOREVER, "--nnodes", "1", name="second")
    until(user, lambda it: "(Slurm: Resources)" in (it["waiting"] or ""), "Slurm has looked at it", "second")
    assert "the resources that it asks for are in use" in user.paceline("get", "second").stdout
    states = user.json("top", "node", "--on", "lab")
    assert [node["state"] for node in states] == ["allocated"] * 3
    user.paceline("stop", "first", "second")
    for name in ("first", "second"):
        reaches(user, "STOPPED", name)
    assert user.paceline("wait", "second", check=False).returncode != 0


def test_a_suspended_job_is_held_by_slurm(user: Client, cluster: Cluster) -> None:
    submit(user, FOREVER)
    submit(user, FOREVER, "--slurm", "no-requeue", name="no")
    submit(user, FOREVER, "--slurm", "begin=now+1hour", name="waits")
    reaches(user, "RUNNING")
    reaches(user, "RUNNING", "no")
    refused = user.paceline("suspend", "it", "no", check=False)
    assert refused.returncode == 2 and "job no may not be requeued in Slurm" in refused.stderr, refused.stderr
    assert job(user)["state"] == "RUNNING", "all or none"
    user.paceline("stop", "no")
    user.paceline("suspend", "it", "waits")
    assert "JobHeldUser" in cluster.slurm("scontrol", "show", "job", job(user, "waits")["external_id"])
    user.paceline("resume", "waits")
    assert job(user, "waits")["state"] == "PENDING"
    user.paceline("stop", "waits")
    cluster.slurm("scontrol", "release", reaches(user, "SUSPENDED")["external_id"])
    reaches(user, "RUNNING")
    assert user.paceline("logs", "it").stdout == "here\n", "it goes on: its user has released it"
    user.paceline("suspend", "it")
    user.paceline("stop", "it")
    reaches(user, "STOPPED")


def test_other_jobs_of_slurm_are_left_alone(user: Client, cluster: Cluster) -> None:
    number = cluster.slurm("sbatch", "--parsable", "--comment=other", "--wrap=sleep 600").strip()
    submit(user, FOREVER)
    reaches(user, "RUNNING")
    assert [each["name"] for each in user.json("list", "--on", "lab")] == ["it"]
    user.paceline("stop", "--on", "lab", "it")
    reaches(user, "STOPPED")
    user.paceline("delete", "--on", "lab", "it")
    eventually(
        lambda: cluster.slurm("squeue", "--noheader", "--format=%A").split() == [number], "only that goes on", 0.1
    )


def test_many_watchers_ask_slurm_once_in_ten_seconds(user: Client, cluster: Cluster) -> None:
    for number in range(3):
        submit(user, FOREVER, name=f"it{number}")
    for number in range(3):
        reaches(user, "RUNNING", f"it{number}")
    cluster.forget_calls()
    begun = time.monotonic()
    waiting = [user.start("wait", "--on", "lab", f"it{number}") for number in range(3)]
    for _ in range(10):
        user.paceline("list", "--on", "lab")
    user.paceline("stop", "--on", "lab", "it0", "it1", "it2")
    for process in waiting:
        process.communicate()
    calls = [call for call in cluster.calls if not call.startswith("scancel")]
    times = [float(json.loads((path).read_text())["asked"]) for path in user.folder.rglob("queue.json")]
    assert len(times) == 1 and all(call.startswith("squeue") for call in calls), calls
    # A generous bound: each is at least ten seconds after the one before, beside those of stop.
    assert len(calls) <= 8 + (time.monotonic() - begun) / 10, calls
