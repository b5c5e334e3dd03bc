"""Jobs on nodes that share no disk with the login node, nor with each other."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import GENEROUS, eventually

from .client import FOREVER, job, reaches, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .client import Client
    from .cluster import Cluster

RANKS = """
    import os, pathlib, sys, time
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    print("rank", rank, "of", size, "on", os.uname().nodename, open("data").read(), flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    if sys.argv[1:]:  # a failure, when all have printed
        seen = pathlib.Path(sys.argv[2])
        (seen / rank).touch()
        while len(list(seen.iterdir())) < int(size):
            time.sleep(0.1)
        sys.exit(int(rank) * int(sys.argv[1]))
"""


@pytest.fixture
def user(client: Client, cluster: Cluster) -> Iterator[Client]:
    """Its whole folder is on the login machine alone, with the jobs' root in it."""
    root = client.folder / "root"
    (client.folder / "paceline.toml").write_text(
        f'[targets.lab]\nbackend = "slurm"\nroot = "{root}"\nbroadcast = true\n'
    )
    (client.folder / "project").mkdir()
    (client.folder / "project" / "data").write_text("sent")
    with contextlib.ExitStack() as stack:
        for node in cluster.nodes:
            stack.enter_context(cluster.hidden(node, client.folder))
        yield client
        cluster.repair()


@pytest.fixture
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all nodes see."""
    return tmp_path_factory.mktemp("seen")


def start(user: Client, verb: str, script: str, *flags: str, args: tuple[str, ...] = (), code: int | None = 0) -> Any:
    user.script(script, "project/script.py")
    sent = ("--sync-mode", "snapshot", "--sync-source", str(user.folder / "project"))
    done = user(verb, "--on", "lab", "--name", "it", *sent, *flags, "script.py", *args)
    assert code is None or done.returncode == code, done.stderr
    return done


def logs(user: Client, *flags: str) -> str:
    user.forget()
    return user.paceline("logs", "--on", "lab", *flags, "it").stdout


def test_the_exit_code_and_all_lines_of_a_failed_rank_are_there(user: Client, seen: Path) -> None:
    done = start(user, "run", RANKS, "--nnodes", "2", args=("3", str(seen)), code=3)
    assert "rank 0 of 2 on n0 sent" in done.stdout
    found = job(user)
    assert (found["state"], found["exit_code"]) == ("FAILED", 3), found
    lines = user.paceline("logs", "--on", "lab", "--all", "it").stdout
    assert "rank 0 of 2 on n0 sent" in lines and "rank 1 of 2 on n1 sent" in lines
    assert [rank["node"] for rank in found["instances"]] == ["n0", "n1"]


def test_a_job_that_nobody_followed_is_seen_after_its_end(user: Client, cluster: Cluster) -> None:
    start(user, "submit", RANKS, "--nnodes", "2")
    assert user.paceline("wait", "--on", "lab", "it").returncode == 0
    found = job(user)
    assert (found["state"], found["exit_code"], found["error"]) == ("SUCCEEDED", 0, None), found
    lines = user.paceline("logs", "--on", "lab", "--all", "it").stdout
    assert "rank 0 of 2 on n0 sent" in lines and "rank 1 of 2 on n1 sent" in lines
    assert [rank["node"] for rank in job(user)["instances"]] == ["n0", "n1"]


WAITS = """
    import os, sys, time
    print("here on", os.uname().nodename, flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.1)
    for number in range(5000):
        print("line", number, "of", os.environ["RANK"])
    print("gone from", os.uname().nodename, flush=True)
"""


def test_logs_follow_a_running_job_to_its_last_line(user: Client, seen: Path) -> None:
    go = seen / "go"
    start(user, "submit", WAITS, "--nnodes", "2", args=(str(go),))
    following = user.start("logs", "-f", "--all", "--on", "lab", "it")
    until(user, lambda it: len(it["instances"]) == 2 and it["state"] == "RUNNING", "it runs on both nodes")
    eventually(lambda: "here on n1" in logs(user, "--all"), "what it prints is seen", 0.3)
    assert user.paceline("attach", "--on", "lab", "-i", "1", "it", "--", "uname", "-n").stdout == "n1\n"
    go.touch()
    out, err = following.communicate(timeout=GENEROUS)
    assert following.returncode == 0, err
    for rank in "01":
        assert [line for line in out.splitlines() if line.endswith(f" of {rank}")][-1].endswith(f"line 4999 of {rank}")
        assert sum(line.endswith(f" of {rank}") for line in out.splitlines()) == 5000
        assert f"gone from n{rank}" in out
    assert job(user)["state"] == "SUCCEEDED"


def test_logs_that_cannot_be_fetched_are_named(user: Client, cluster: Cluster) -> None:
    start(user, "submit", RANKS, "--nnodes", "2")
    user.paceline("wait", "--on", "lab", "it")
    cluster.drain("n0")
    done = user("logs", "--on", "lab", "it")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"on n0 in {user.folder}/root/slurm/it/lives/" in done.stderr and "was not fetched" in done.stderr
    cluster.resume("n0")
    assert "rank 0 of 2" in user.paceline("logs", "--on", "lab", "it").stdout


def test_a_job_that_was_cancelled_with_slurms_commands(user: Client, cluster: Cluster) -> None:
    start(user, "submit", FOREVER, "--nnodes", "2")
    number = reaches(user, "RUNNING")["external_id"]
    eventually(lambda: "here" in logs(user), "it has printed", 0.3)
    cluster.slurm("scancel", number)
    assert "cancelled in Slurm" in reaches(user, "STOPPED")["error"]
    assert "here" in logs(user), "what was seen before is kept"


def test_code_that_is_too_large_is_refused(user: Client, cluster: Cluster) -> None:
    (user.folder / "project" / "weights").write_bytes(os.urandom(5 << 20))
    done = start(user, "submit", FOREVER, code=2)
    assert done.stderr.count("\n") == 1, done.stderr
    assert "batch script of 7." in done.stderr and "Slurm takes 4.0 MiB" in done.stderr, done.stderr
    assert ".pacelineignore" in done.stderr
    assert cluster.slurm("squeue", "--noheader") == ""
    assert user.paceline("list", "--on", "lab", "-o", "json").stdout == "[]\n"


def test_a_node_that_cannot_keep_the_job_is_named(user: Client, cluster: Cluster) -> None:
    inside = ["nsenter", "--mount", f"--target={cluster.daemon('n0')}"]
    subprocess.run([*inside, "mount", "-o", "remount,ro", str(user.folder)], check=True)
    start(user, "submit", FOREVER, "--nnodes", "2")
    found = reaches(user, "FAILED")
    assert "n0: cannot write to" in found["error"] and "set root" in found["error"], found
    assert "Read-only" in found["error"]


def on_node(cluster: Cluster, node: str, command: str) -> str:
    inside = ["nsenter", "--mount", f"--target={cluster.daemon(node)}", "sh", "-c", command]
    return subprocess.run(inside, check=False, capture_output=True, text=True).stdout


def test_deleting_a_job_removes_it_on_its_nodes(user: Client, cluster: Cluster) -> None:
    start(user, "submit", FOREVER, "--nnodes", "2")
    reaches(user, "RUNNING")
    done = user("delete", "--on", "lab", "it")
    assert done.returncode == 2 and "has not ended" in done.stderr, done.stderr
    user.paceline("stop", "--on", "lab", "it")
    number = reaches(user, "STOPPED")["external_id"]
    # Its batch script has said that it ends, and then tells Slurm.
    eventually(lambda: "CANCELLED" in cluster.slurm("scontrol", "show", "job", number), "Slurm knows it", 0.1)
    listed = f"ls {user.folder}/root/slurm"
    assert [on_node(cluster, node, listed) for node in ("n0", "n1")] == ["it\n", "it\n"]
    user.paceline("delete", "--on", "lab", "it")
    eventually(
        lambda: not any(on_node(cluster, node, listed) for node in ("n0", "n1")), "the nodes have removed it", 0.1
    )
    done = start(user, "run", RANKS, "--nnodes", "2")
    assert "rank 0 of 2 on n0 sent" in done.stdout, "the name is free again"


def test_a_lost_node_ends_the_job_with_a_clear_line(user: Client, cluster: Cluster) -> None:
    start(user, "submit", FOREVER, "--nnodes", "2")
    reaches(user, "RUNNING")
    cluster.kill_slurmd("n1", with_job=True)
    cluster.down("n1")
    found = reaches(user, "FAILED")
    assert re.search("a node of it failed|n1", found["error"]) and "--checkpoint-dir" in found["error"], found


def test_a_client_that_is_killed_ends_its_job(user: Client, cluster: Cluster) -> None:
    user.script(FOREVER, "project/script.py")
    sent = ("--sync-mode", "snapshot", "--sync-source", str(user.folder / "project"))
    client = user.start("run", "--on", "lab", "--name", "it", *sent, "--nnodes", "2", "script.py")
    assert client.stdout is not None and client.stdout.readline() == "here\n"
    client.kill()
    client.communicate()
    reaches(user, "STOPPED")


def test_what_needs_a_shared_disk_is_refused(user: Client) -> None:
    for flag in (("--chain",), ("--array", "0-1")):
        done = start(user, "submit", FOREVER, *flag, code=2)
        assert flag[0] in done.stderr and "root" in done.stderr, done.stderr
    start(user, "run", RANKS)
    done = user("resubmit", "--on", "lab", "it", "--name", "again")
    assert done.returncode == 2 and "--fresh" in done.stderr and "--checkpoint-dir" in done.stderr, done.stderr
    user.paceline("resubmit", "--on", "lab", "it", "--fresh", "--name", "again")
    user.paceline("wait", "--on", "lab", "again")
    assert "rank 0 of 1" in user.paceline("logs", "--on", "lab", "again").stdout


def test_a_job_that_slurm_has_forgotten(user: Client, cluster: Cluster) -> None:
    start(user, "submit", FOREVER, "--nnodes", "2")
    reaches(user, "RUNNING")
    cluster.kill_slurmctld()
    cluster.start_slurmctld(forget=True)
    assert "Slurm does not know any more how it ended" in reaches(user, "FAILED")["error"]


def test_a_requeued_job_goes_on_from_checkpoints_that_all_nodes_see(user: Client, cluster: Cluster, seen: Path) -> None:
    start(user, "submit", WAITS, "--nnodes", "2", "--checkpoint-dir", str(seen / "saved"), args=(str(seen / "go"),))
    number = reaches(user, "RUNNING")["external_id"]
    eventually(lambda: "here on n0" in logs(user), "it has printed", 0.3)
    cluster.slurm("scontrol", "requeue", number)
    until(user, lambda it: it["attempt"] == 1, "it runs again, and attempts are counted on")
    reaches(user, "RUNNING")
    (seen / "go").touch()
    user.paceline("wait", "--on", "lab", "it")
    assert job(user)["state"] == "SUCCEEDED"
    assert "here on n0" in user.paceline("logs", "--on", "lab", "--attempt", "0", "it").stdout
    assert "gone from n0" in user.paceline("logs", "--on", "lab", "--attempt", "1", "it").stdout


def test_check_knows_that_the_disk_is_not_shared(user: Client) -> None:
    done = user("check", "--on", "lab", "-o", "json")
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert not [it for it in found["findings"] if it["level"] == "error"]
    assert "so the code is sent" in dict(found["sections"]["Short job"])["shared disk"]
    settings = user.folder / "paceline.toml"
    settings.write_text(settings.read_text().replace("broadcast = true", ""))
    done = user("check", "--on", "lab")
    assert done.returncode == 1 and "or broadcast = true" in done.stdout + done.stderr
