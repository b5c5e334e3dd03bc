"""The cluster does what the tests of paceline rely on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually
from tests.lab.lab import inside
from tests.needs import need

from paceline.backends.slurm.sbatch_options import ABBREVIATED, KNOWN, OURS

from .cluster import Cluster, missing

if TYPE_CHECKING:
    from .client import Client

ROOT = Path(__file__).parents[3]
WAITING = "#!/bin/sh\necho start $SLURM_RESTART_COUNT $SLURM_JOB_NODELIST >> starts\nexec sleep 1000\n"


def submit(client: Client, script: str, *options: str) -> str:
    """Submit a script; returns the job's number."""
    client.script(script, "job.sh")
    done = client.sh(f"sbatch --parsable {' '.join(options)} job.sh")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def state(client: Client, job: str) -> str:
    return client.cluster.slurm("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip()


def starts(client: Client) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return (client.folder / "starts").read_text().splitlines()
    return []


def test_script_runs_on_two_nodes(client: Client) -> None:
    job = submit(client, "#!/bin/sh\nsrun hostname\n", "-N2", "--output=out")
    eventually(lambda: state(client, job) == "COMPLETED", "the job has ended", 0.1)
    assert sorted((client.folder / "out").read_text().split()) == ["n0", "n1"]
    (call,) = client.cluster.calls
    assert call == "sbatch --parsable -N2 --output=out job.sh"
    assert client.cluster.calls_of_jobs == ["n0 srun hostname"]


def test_user_is_on_login_and_sees_paceline(client: Client) -> None:
    assert client.sh("hostname; srun -N3 hostname | sort").stdout.split() == ["login", "n0", "n1", "n2"]
    assert client.paceline("--version").stdout


def test_nodes_know_each_other_by_name(client: Client) -> None:
    assert client.sh("srun -w n0 getent hosts n2").stdout.split() == ["10.78.0.12", "n2"]


def test_gpus_are_given_out(client: Client) -> None:
    first = submit(client, "#!/bin/sh\necho $CUDA_VISIBLE_DEVICES\nexec sleep 1000\n", "-w n0 --gres=gpu:1 -o first")
    eventually(lambda: state(client, first) == "RUNNING", "the first job runs", 0.1)
    assert client.sh("srun -w n0 --gres=gpu:1 printenv CUDA_VISIBLE_DEVICES").stdout == "1\n"
    assert client.sh("srun -w n1 --gres=gpu:2 printenv CUDA_VISIBLE_DEVICES").stdout == "0,1\n"


def test_job_of_a_lost_node_starts_again(client: Client) -> None:
    job = submit(client, WAITING, "-w n0")
    eventually(lambda: starts(client), "the job runs")
    client.cluster.kill_slurmd("n0", with_job=True)
    client.cluster.down("n0")
    client.cluster.start_slurmd("n0")
    eventually(lambda: len(starts(client)) == 2, "the job runs again")
    assert starts(client) == ["start n0", "start 1 n0"]
    assert state(client, job) == "RUNNING"


def test_job_outlives_a_restart_of_its_slurmd(client: Client) -> None:
    job = submit(client, WAITING, "-w n0")
    eventually(lambda: starts(client), "the job runs")
    client.cluster.kill_slurmd("n0", with_job=False)
    client.cluster.start_slurmd("n0")
    assert state(client, job) == "RUNNING"
    client.cluster.slurm("scancel", job)
    eventually(lambda: state(client, job) == "CANCELLED", "the job is cancelled", 0.1)


@pytest.mark.nightly  # test_a_preempted_job_saves_and_goes_on relies on it too
def test_urgent_job_takes_a_node_away(client: Client) -> None:
    first = submit(client, WAITING, "-N3", "--exclusive")
    eventually(lambda: starts(client), "the first job runs")
    second = submit(client, WAITING, "-p urgent", "-w n1")
    eventually(lambda: state(client, second) == "RUNNING", "the urgent job runs", 0.1)
    eventually(lambda: state(client, first) == "PENDING", "the first job waits", 0.1)
    client.cluster.slurm("scancel", second)
    eventually(lambda: len(starts(client)) == 3, "the first job runs again")
    assert starts(client)[2] == "start 1 n[0-2]"


def test_time_limit_passes(client: Client) -> None:
    job = submit(client, WAITING, "--time=10")
    eventually(lambda: starts(client), "the job runs")
    client.cluster.pass_limit(job)
    eventually(lambda: state(client, job) == "TIMEOUT", "the job is ended", 0.1)


def test_submission_to_a_hanging_slurmctld_arrives_all_the_same(client: Client) -> None:
    client.script(WAITING, "job.sh")
    client.cluster.hang_slurmctld()
    done = client.sh("sbatch job.sh")
    assert done.returncode != 0
    assert "Socket timed out" in done.stderr
    client.cluster.wake_slurmctld()
    eventually(lambda: starts(client), "the job runs")


def test_without_slurmctld_nobody_answers(client: Client) -> None:
    job = submit(client, WAITING)
    eventually(lambda: starts(client), "the job runs")
    client.cluster.kill_slurmctld()
    done = client.sh("squeue")
    assert done.returncode != 0
    assert "Unable to contact slurm controller" in done.stderr
    client.cluster.start_slurmctld()
    assert client.sh("squeue -h -o %A").stdout.split() == [job]


def test_forgetful_slurmctld_knows_no_jobs(client: Client) -> None:
    submit(client, WAITING)
    eventually(lambda: starts(client), "the job runs")
    client.cluster.kill_slurmctld()
    client.cluster.start_slurmctld(forget=True)
    assert client.sh("squeue -h").stdout == ""


def test_without_munged_nobody_is_anybody(client: Client) -> None:
    client.cluster.kill_munged()
    client.script("#!/bin/sh\n", "job.sh")
    done = client.sh("sbatch job.sh")
    assert done.returncode != 0
    assert "munge" in done.stderr.lower()
    client.cluster.start_munged()
    assert client.sh("sbatch job.sh").returncode == 0


def test_drained_node_gets_no_job(client: Client) -> None:
    client.cluster.drain("n0")
    assert client.cluster.states()["n0"] == "drained"
    assert client.sh("srun -N2 hostname | sort").stdout.split() == ["n1", "n2"]
    client.cluster.resume("n0")
    assert client.cluster.states()["n0"] == "idle"


def test_command_can_be_broken(client: Client) -> None:
    client.cluster.break_command("sbatch", '"$real" "$@" > /dev/null; echo too late >&2; exit 1')
    client.script(WAITING, "job.sh")
    done = client.sh("sbatch job.sh")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "too late\n")
    eventually(lambda: starts(client), "the job runs all the same")
    client.cluster.repair()
    assert client.cluster.calls == []
    assert "Submitted batch job" in client.sh("sbatch job.sh").stdout


def test_killed_cluster_is_removed_by_the_next() -> None:
    need(missing())
    program = (
        "from tests.lab.slurm.cluster import Cluster; c = Cluster(1); c.start(); print(c.prefix, c.folder, flush=True);"
        " import time; time.sleep(1000)"
    )
    killed = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert killed.stdout is not None
    prefix, folder = killed.stdout.readline().split()
    daemons = [pid for name in ("hub", "ctl", "n0") for pid in inside(f"{prefix}-{name}")]
    assert len(daemons) == 4  # slurmctld has a helper
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    it = Cluster(1)
    try:
        it.start()
        assert it.states() == {"n0": "idle"}
    finally:
        it.stop()
    for pid in daemons:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a zombie is there, and has no files
            assert not os.listdir(f"/proc/{pid}/fd")
    assert not Path(folder).exists()
    assert not [name for name in os.listdir("/run/netns") if name.startswith(f"{prefix}-")]


def test_each_option_of_sbatch_is_known(cluster: Cluster) -> None:
    said = cluster.slurm("sbatch", "--help")
    assert set(re.findall(r"--([a-z][a-z-]+)", said)) <= KNOWN | OURS.keys()
    assert dict(re.findall(r"-([a-zA-Z]), --([a-z][a-z-]+)", said)).items() <= ABBREVIATED.items()
