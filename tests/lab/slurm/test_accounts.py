"""Jobs on a Slurm cluster that keeps accounts, with limits of accounts and of qualities of service (QOS)."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually
from tests.needs import need

from .accounting import missing as missing_accounting
from .client import FOREVER, job, reaches, until
from .cluster import Cluster, missing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .client import Client


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with accounting, where the account vision runs one job at a time, and the QOS small none of 10 min."""
    need(missing() or missing_accounting())
    it = Cluster(2, accounts=True)
    try:
        it.start()
        for command in (
            ("add", "account", "vision", "maxjobs=1"),
            ("add", "user", "root", "account=vision"),
            ("add", "qos", "small", "maxwall=10"),
            ("modify", "user", "root", "set", "qos+=small"),
        ):
            it.slurm("sacctmgr", "--immediate", *command)
        yield it
    finally:
        it.stop()


def submit(user: Client, *flags: str, name: str = "it") -> None:
    user.paceline("submit", "--on", "lab", "--name", name, *flags, user.script(FOREVER))


def is_forgotten(cluster: Cluster, number: str, word: str) -> None:
    """Let squeue forget a job, as Slurm does after MinJobAge, once the accounts have how it ended."""
    eventually(
        lambda: word in cluster.slurm("sacct", "-n", "-X", "-o", "State", "-j", number), "it is in the accounts", 0.1
    )
    cluster.break_command("squeue", "exit 0")


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("account=nobody", "invalid account or account/partition combination specified"),
        ("qos=no", "invalid qos spec.*"),
    ],
)
def test_what_the_user_may_not_use_is_refused(user: Client, cluster: Cluster, flag: str, why: str) -> None:
    for dry in ((), ("--dry-run",)):
        done = user.paceline("submit", "--on", "lab", *dry, "--slurm", flag, user.script("pass"), check=False)
        assert done.returncode == 2 and done.stdout == "", done.stderr
        assert re.fullmatch(f"paceline: Slurm refuses the job: (?i:{why}).*\n", done.stderr), done.stderr
    assert cluster.slurm("squeue", "--noheader") == ""


def test_why_a_job_waits_for_a_limit(user: Client) -> None:
    submit(user, "--slurm", "account=vision", name="first")
    until(user, lambda found: found["state"] == "RUNNING", "it runs, and the next one waits", "first")
    submit(user, "--slurm", "account=vision", name="second")
    submit(user, "--slurm", "qos=small", "--time-limit", "1h", name="long")
    for name, why in (
        ("second", "its account allows no more jobs at the same time (Slurm: AssocMaxJobsLimit)"),
        ("long", "it asks for more time than its QOS allows one job, so it does not start"),
    ):
        until(user, lambda found, why=why: why in (found["waiting"] or ""), why, name)  # type: ignore[misc]


def test_a_job_that_was_cancelled_while_it_waited(user: Client, cluster: Cluster) -> None:
    submit(user, "--slurm", "hold")
    number = job(user)["external_id"]
    cluster.slurm("scancel", number)
    is_forgotten(cluster, number, "CANCELLED")
    assert reaches(user, "STOPPED")["error"] == "it was cancelled in Slurm before it started"


def test_a_job_that_lost_its_node(user: Client, cluster: Cluster) -> None:
    submit(user, "--slurm", "no-requeue")
    found = reaches(user, "RUNNING")
    (node,) = {rank["node"] for rank in found["instances"]}
    cluster.kill_slurmd(node, with_job=True)
    cluster.down(node)
    is_forgotten(cluster, found["external_id"], "NODE_FAIL")
    reaches(user, "FAILED")
    for _ in range(2):  # that the accounts were asked changes nothing
        assert job(user)["error"] == "a node of it failed; paceline resubmit it starts it again"


def test_check(user: Client) -> None:
    done = user("check", "--on", "lab", "-o", "json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert dict(report["sections"]["Slurm"])["accounting"] == "on, sacct answers"


def test_check_with_a_qos_that_is_not_there(user: Client) -> None:
    (user.folder / "paceline.toml").write_text('[targets.lab]\nbackend = "slurm"\nslurm = { qos = "no" }\n')
    done = user("check", "--on", "lab", "-o", "json")
    (finding,) = [it for it in json.loads(done.stdout)["findings"] if it["level"] == "error"]
    assert done.returncode == 1 and "Invalid qos specification" in finding["what"], finding
