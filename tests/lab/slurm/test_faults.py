"""What happens to Slurm jobs when Slurm, its nodes or clients fail."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually, processes_with
from tests.train.loop.test_exactly_once import Training

from .client import FOREVER, job, reaches, submit, until

if TYPE_CHECKING:
    from .client import Client
    from .cluster import Cluster


class Counting(Training):
    """A training on the cluster that records which samples each step used."""

    def __init__(self, user: Client, epochs: int) -> None:
        super().__init__(user, 0, epochs=epochs)
        self.user = user
        self.slow = user.folder / "slow"  # while it is there, a step takes half a second

    def submit(self, *flags: str) -> None:
        args = ("train.py", str(self.user.folder), str(self.epochs), "0")
        self.user.paceline("submit", "--on", "lab", "--name", "it", *flags, *args)

    def makes_steps(self, more: int) -> None:
        goal = self.steps() + more
        eventually(lambda: self.steps() >= goal, lambda: f"steps are made; {job(self.user)}")

    def ends_well(self) -> None:
        done = self.user.paceline("wait", "--on", "lab", "it", check=False)
        assert done.returncode == 0, (done.stderr, job(self.user))
        self.check()


STAYS = """
    import os, socket, sys, time
    socket.getaddrinfo(os.environ["MASTER_ADDR"], None)
    open(os.path.join(sys.argv[1], "-".join(["here", os.environ["PACELINE_ATTEMPT"], os.environ["RANK"]])), "w").close()
    while not os.path.exists(os.path.join(sys.argv[1], "end")):
        time.sleep(0.05)
"""


class Staying:
    """A job whose ranks say that they are there, and end when they are told to."""

    def __init__(self, user: Client, *flags: str, name: str = "it") -> None:
        self.user, self.name = user, name
        self.folder = user.folder / f"{name}-says"
        self.folder.mkdir()
        submit(user, STAYS, *flags, name=name, args=(str(self.folder),))

    def runs(self, attempt: int, ranks: int) -> None:
        """Wait until all ranks of an attempt run."""
        said = lambda: len(list(self.folder.glob(f"here-{attempt}-*"))) == ranks  # noqa: E731
        eventually(said, lambda: f"attempt {attempt} runs; {job(self.user, self.name)}")

    def ends_well(self) -> None:
        (self.folder / "end").touch()
        done = self.user.paceline("wait", "--on", "lab", self.name, check=False)
        assert done.returncode == 0, (done.stderr, job(self.user, self.name))


def test_a_requeued_job_goes_on(user: Client, cluster: Cluster) -> None:
    it = Staying(user, "--nnodes", "2")
    it.runs(0, ranks=2)
    cluster.slurm("scontrol", "requeue", job(user)["external_id"])
    it.runs(1, ranks=2)
    it.ends_well()
    events = [it["event"] for it in user.json("events", "it")]
    assert events.count("started") == 4
    assert user.paceline("logs", "it", "--attempt", "0", check=False).returncode == 0


def test_a_preempted_job_saves_and_goes_on(user: Client, cluster: Cluster) -> None:
    pytest.importorskip("torch")
    training = Counting(user, 12)
    training.slow.touch()  # until it has given way
    training.submit("--nnodes", "2", "--slurm", "exclusive")
    training.makes_steps(10)
    number = cluster.slurm(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive", "--wrap=sleep 600"
    ).strip()
    reaches(user, "RESTARTING")
    running = lambda: cluster.slurm("squeue", "--noheader", "--format=%T", f"--jobs={number}") == "RUNNING\n"  # noqa: E731
    eventually(running, "its nodes are free, so what it saved last is there", 0.1)
    assert "preempted" in job(user)["waiting"] or "Slurm" in job(user)["waiting"], job(user)["waiting"]
    saved = job(user)["checkpoint"]["step"]
    training.slow.unlink()
    cluster.slurm("scancel", number)
    training.ends_well()
    starts = [line for path in training.records.iterdir() for line in path.read_text().splitlines() if "start" in line]
    assert f"start {saved}" in starts, "it went on from where it was asked to stop"


def test_a_lost_node(user: Client, cluster: Cluster) -> None:
    it = Staying(user, "--nnodes", "2")
    it.runs(0, ranks=2)
    cluster.kill_slurmd("n1", with_job=True)
    cluster.down("n1")
    it.runs(1, ranks=2)
    it.ends_well()
    assert {rank["node"] for rank in job(user)["instances"]} == {"n0", "n2"}


def limit(user: Client, cluster: Cluster, name: str) -> None:
    """Give a job that runs one or two minutes more."""
    number = job(user, name)["external_id"]
    minutes = int(cluster.slurm("squeue", "--noheader", "--format=%M", f"--jobs={number}").split(":")[0])
    cluster.slurm("scontrol", "update", f"jobid={number}", f"timelimit={minutes + 2}")


def test_the_time_limit_of_a_job_and_of_a_chain_of_jobs(user: Client, cluster: Cluster) -> None:
    """Both at once: the limit is a matter of minutes."""
    pytest.importorskip("torch")
    training = Counting(user, 10_000)
    training.submit("--grace", "110s")  # so Slurm warns it at once
    chain = Staying(user, "--grace", "110s", "--chain", name="chain")
    chain.runs(0, ranks=1)
    training.makes_steps(10)
    first = job(user, "chain")["external_id"]
    for name in ("it", "chain"):
        limit(user, cluster, name)
    assert user.paceline("wait", "it", check=False).returncode == 124
    found = job(user)
    assert (found["state"], found["exit_code"]) == ("FAILED", 124)
    assert "stopped at its time limit" in found["error"] and found["checkpoint"] is not None
    last = max(int(line.split()[1]) for path in training.records.iterdir() for line in path.read_text().splitlines())
    assert found["checkpoint"]["step"] >= last - 1, "it was asked to save at the end"
    chain.runs(1, ranks=1)
    assert until(user, lambda it: it["attempt"] == 1, "it goes on in another job", "chain")["external_id"] != first
    user.paceline("stop", "--on", "lab", "chain")
    reaches(user, "STOPPED", "chain")


def test_a_job_that_was_cancelled_from_outside(user: Client, cluster: Cluster) -> None:
    submit(user, FOREVER, "--nnodes", "2", "-n", "2", name="runs")
    reaches(user, "RUNNING", "runs")
    submit(user, FOREVER, "--slurm", "hold", name="waits")
    for name in ("runs", "waits"):
        cluster.slurm("scancel", job(user, name)["external_id"])
    for name in ("runs", "waits"):
        reaches(user, "STOPPED", name)
        assert "cancelled in Slurm" in job(user, name)["error"]
    ranks = job(user, "runs")["instances"]
    assert [rank["state"] for rank in ranks] == ["STOPPED"] * 4, ranks
    cluster.break_command("squeue", "exit 0")  # Slurm forgets them after some minutes
    user.forget()
    for name in ("runs", "waits"):
        reaches(user, "STOPPED", name)
        assert "cancelled in Slurm" in job(user, name)["error"]
    user.paceline("delete", "--on", "lab", "runs", "waits")


def test_a_signal_by_hand_is_no_time_limit(user: Client, cluster: Cluster) -> None:
    submit(user, FOREVER, "--chain", "--time-limit", "1h", name="it")
    reaches(user, "RUNNING")
    cluster.slurm("scancel", "--batch", "--signal=USR2", job(user)["external_id"])
    found = reaches(user, "STOPPED")
    assert (found["exit_code"], found["cause"]) == (143, None)
    assert found["error"].startswith("stopped by a signal, USR2, that was not Slurm's warning before its time limit")
    ask = ("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={found['external_id']}")
    eventually(lambda: cluster.slurm(*ask) != "COMPLETING\n", "the node has cleaned up", 0.1)  # it hides how a job ends
    assert cluster.slurm(*ask) == "CANCELLED\n"


def test_a_signal_that_slurm_loses(user: Client, cluster: Cluster) -> None:
    cluster.break_command("scancel", 'case " $*" in *" --signal="*) exit 0 ;; esac; exec "$real" "$@"')
    submit(user, FOREVER, "--nnodes", "2")
    reaches(user, "RUNNING")
    user.paceline("stop", "--on", "lab", "it")
    reaches(user, "STOPPED")


def test_slurm_does_not_stop_a_job_in_the_foreground(user: Client, cluster: Cluster) -> None:
    run = user.start("run", "--on", "lab", user.script(FOREVER))
    assert run.stdout is not None and run.stderr is not None
    assert run.stdout.readline() == "here\n"
    assert any("Slurm has it as job " in line for line in run.stderr)
    cluster.break_command("scancel", 'echo "scancel: error: Kill job error: Access/permission denied" >&2; exit 1')
    run.terminate()
    said = next(line for line in run.stderr if "nothing was stopped" in line)
    why = "scancel: Kill job error: Access/permission denied; nothing was stopped"
    assert said == f"paceline: {why}; paceline tries again to stop the job\n"
    run.terminate()  # then at once
    cluster.break_command("scancel", 'exec "$real" "$@"')
    run.communicate()
    assert run.returncode == 128 + signal.SIGTERM


def test_slurmctld_is_down(user: Client, cluster: Cluster) -> None:
    submit(user, FOREVER)
    reaches(user, "RUNNING")
    cluster.kill_slurmctld()
    user.forget()
    listed = user.paceline("list")  # which waits for no target any longer
    assert re.search(r"^it +lab +RUNNING ", listed.stdout, re.M), listed
    user.forget()
    assert "Slurm's controller" in user.paceline("list", "--on", "lab").stderr
    refused = user.paceline("submit", "--on", "lab", "--name", "other", user.script(FOREVER), check=False)
    assert refused.returncode == 2 and "slurmctld" in refused.stderr and len(refused.stderr.splitlines()) == 1
    stopped = user.paceline("stop", "--on", "lab", "it", check=False)
    assert stopped.returncode == 2 and "nothing was stopped" in stopped.stderr, stopped.stderr
    assert job(user)["state"] == "RUNNING"
    cluster.start_slurmctld()
    assert [it["name"] for it in user.json("list", "--on", "lab")] == ["it"]
    user.paceline("stop", "--on", "lab", "it")
    reaches(user, "STOPPED")


def test_the_login_node_does_not_know_the_user_for_a_moment(user: Client, cluster: Cluster) -> None:
    submit(user, FOREVER, name="runs")
    reaches(user, "RUNNING", "runs")
    submit(user, FOREVER, "--slurm", "hold", name="waits")
    unknown = 'for word; do shift; set -- "$@" "$(echo "$word" | sed s/^--user=.*/--user=54321/)"; done'
    cluster.break_command("squeue", f'{unknown}\nexec "$real" "$@"')  # as while sssd or LDAP does not answer
    waiting = user.start("wait", "--on", "lab", "runs")
    for name, state in (("runs", "RUNNING"), ("waits", "PENDING")):
        user.forget()
        shown = user.paceline("list", "--on", "lab")
        assert re.search(rf"^{name} .*{state} ", shown.stdout, re.M), shown
        assert "squeue: Invalid user" in shown.stderr, shown
        assert job(user, name)["state"] == state
        for verb in ("delete", "resubmit"):
            user.forget()
            refused = user.paceline(verb, "--on", "lab", name, check=False)
            assert refused.returncode == 2 and f"paceline stop {name}" in refused.stderr, refused.stderr
    cluster.break_command("squeue", 'exec "$real" "$@"')
    cluster.slurm("scancel", job(user, "runs")["external_id"])
    assert waiting.wait() == 143, "it has waited until Slurm said that it is over"
    assert until(user, lambda it: it["state"] == "PENDING" and "holds it" in it["waiting"], "it waits", "waits")
    assert len(cluster.slurm("squeue", "--noheader").splitlines()) == 1, "nothing was submitted twice"


def test_a_client_is_interrupted_while_slurmctld_is_down(user: Client, cluster: Cluster) -> None:
    running = user.start("run", "--on", "lab", "--name", "it", user.script(FOREVER))
    assert running.stdout is not None and running.stderr is not None
    assert running.stdout.readline() == "here\n"
    cluster.kill_slurmctld()
    running.send_signal(signal.SIGTERM)
    said = next(line for line in running.stderr if "tries again to stop the job" in line)
    assert "slurmctld" in said
    cluster.start_slurmctld()
    running.communicate()
    assert running.returncode == 128 + signal.SIGTERM
    assert job(user)["state"] == "STOPPED"


def test_slurmctld_comes_back_during_submit(user: Client, cluster: Cluster) -> None:
    flag = user.folder / "down"
    cluster.break_command(
        "sbatch",
        f'case "$*" in *test-only*) ;; *) if [ ! -e {flag} ]; then touch {flag}; '
        'echo "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)" >&2; '
        'exit 1; fi;; esac; exec "$real" "$@"',
    )
    submit(user, "print('it runs')")
    user.paceline("wait", "it")
    assert user.paceline("logs", "it").stdout == "it runs\n"


def test_sbatch_answers_too_late(user: Client, cluster: Cluster) -> None:
    cluster.break_command(
        "sbatch",
        'case "$*" in *test-only*) exec "$real" "$@";; esac; "$real" "$@" >&2; '
        'echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1',
    )
    submit(user, FOREVER)
    number = job(user)["external_id"]
    assert cluster.slurm("squeue", "--noheader", "--format=%A").split() == [number], "there is no second job"
    reaches(user, "RUNNING")


def test_a_client_that_is_killed_while_sbatch_answers(user: Client, cluster: Cluster) -> None:
    asked = user.folder / "asked"
    go = user.folder / "go"
    os.mkfifo(go)
    cluster.break_command(
        "sbatch",
        f'case "$*" in *test-only*) exec "$real" "$@";; esac; touch {asked}; cat {go}; exec "$real" "$@"',
    )
    client = user.start("submit", "--on", "lab", "--name", "it", user.script(FOREVER))
    eventually(asked.exists, "sbatch was called")
    client.kill()
    client.communicate()
    for pid in processes_with(str(user.folder)):
        with contextlib.suppress(OSError):  # it has just ended
            if "sbatch" not in Path(f"/proc/{pid}/cmdline").read_text() and pid != os.getpid():
                with open(f"/proc/{pid}/comm") as comm:
                    if comm.read().startswith("python"):
                        os.kill(pid, signal.SIGKILL)
    with open(go, "w"):
        pass
    eventually(lambda: cluster.slurm("squeue", "--noheader", "--format=%A").split(), "Slurm has the job", 0.1)
    reaches(user, "RUNNING")  # it is found by its comment
    assert [job(user)["external_id"]] == cluster.slurm("squeue", "--noheader", "--format=%A").split()
    user.paceline("stop", "--on", "lab", "it")
    reaches(user, "STOPPED")


def test_munge_is_down(user: Client, cluster: Cluster) -> None:
    submit(user, FOREVER)
    reaches(user, "RUNNING")
    cluster.kill_munged()
    refused = user.paceline("submit", "--on", "lab", user.script(FOREVER), check=False)
    assert refused.returncode == 2 and "munge" in refused.stderr and len(refused.stderr.splitlines()) == 1
    stopped = user.paceline("stop", "--on", "lab", "it", check=False)
    assert stopped.returncode == 2 and "munge" in stopped.stderr
    assert job(user)["state"] == "RUNNING"
    cluster.start_munged()
    user.paceline("stop", "--on", "lab", "it")
    reaches(user, "STOPPED")


def test_a_drained_node_and_a_killed_slurmd(user: Client, cluster: Cluster) -> None:
    it = Staying(user, "--nnodes", "2")
    it.runs(0, ranks=2)
    cluster.drain("n1")
    shown = user.json("top", "node", "--on", "lab")
    assert any("drain" in node["state"] for node in shown)
    cluster.kill_slurmd("n1", with_job=False)
    it.ends_well()


def test_a_node_that_slurm_has_lost_ends_what_runs_elsewhere_now(user: Client, cluster: Cluster) -> None:
    it = Staying(user)
    it.runs(0, ranks=1)
    (node,) = {rank["node"] for rank in job(user)["instances"]}
    cluster.kill_slurmd(node, with_job=False)
    cluster.down(node)
    it.runs(1, ranks=1)
    eventually(lambda: not cluster.processes(node), "nothing works on the old node")
    it.ends_well()


@pytest.mark.parametrize("node", ["n0", "n1"])
def test_a_folder_that_a_node_does_not_see(user: Client, cluster: Cluster, node: str) -> None:
    root = user.folder / "private"
    (user.folder / "paceline.toml").write_text(f'[targets.lab]\nbackend = "slurm"\nroot = "{root}"\n')
    root.mkdir(mode=0o700)
    with cluster.hidden(node, root):
        submit(user, FOREVER, "--nnodes", "3")
        reaches(user, "FAILED")
    said = job(user)["error"]
    assert f"does not see {root} of the machine that submitted the job; set root" in said, said
    assert said.startswith(f"{node} does not" if node == "n1" else f"{node} could not start its batch script"), said
    user.paceline("delete", "--on", "lab", "it")


def test_a_name_that_does_not_resolve(user: Client, cluster: Cluster) -> None:
    with cluster.unnamed("n0"):
        it = Staying(user, "--nnodes", "2")
        it.runs(0, ranks=2)
        it.ends_well()


def test_what_a_node_refuses(user: Client) -> None:
    submit(user, "pass", "--nnodes", "2", "-n", "gpu")
    reaches(user, "FAILED")
    found = job(user)
    assert "no GPU that a process may use" in found["error"] and found["exit_code"] == 2
    assert Counter(rank["state"] for rank in found["instances"]) == Counter()
