"""What a Slurm job asks for, and what Slurm's answers mean."""

from __future__ import annotations

import shlex
import string
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.late import job_spec

from paceline.node.errors import Refused
from paceline.node.host.slurm.job_folder import JobFolder, Start
from paceline.node.host.slurm.job_folders import Jobs
from paceline.node.host.slurm.look import reasons
from paceline.node.host.slurm.look.partitions import gpus
from paceline.node.host.slurm.place import batch_script

if TYPE_CHECKING:
    from paceline.contract.nodejob import NodeJob

OPTIONS: Any = {
    "slurm": {}, "chain": False, "array": None, "no_kill": False, "container": None, "python": "python3",
}  # fmt: skip


def job(**fields: Any) -> NodeJob:
    return replace(job_spec.JobSpec(script="train.py", **fields).for_node(), name="it")


def text(folder: Path = Path("/shared/slurm/it"), slurm: dict[str, Any] | None = None, **fields: Any) -> str:
    options = {**OPTIONS, "slurm": slurm or {}}
    return batch_script.text(job(**fields), folder, ["/usr/bin/python3", "/shared/p.pyz"], options, "id")


@given(st.text(alphabet=string.printable.replace("\n", "").replace("\r", ""), min_size=1).filter(lambda it: it.strip()))
def test_a_script_is_a_shell_script_whatever_its_folder_is_called(name: str) -> None:
    folder = Path("/shared") / name.replace("/", "_").replace("\x0b", "").replace("\x0c", "")
    shown = text(folder)
    assert subprocess.run(["sh", "-n"], input=shown.encode(), capture_output=True, check=False).returncode == 0
    line = next(line for line in shown.splitlines() if line.startswith("job="))
    assert shlex.split(line.removeprefix("job=")) == [str(folder)]


def test_the_users_words_take_precedence() -> None:
    shown = text(
        slurm={"gpus-per-node": "a100:2", "partition": "big", "mem-per-cpu": "2G"}, devices=2, memory="1Gi", queue="q"
    )
    assert "--gres" not in shown and "--mem=" not in shown
    assert "#SBATCH --gpus-per-node=a100:2\n" in shown and "#SBATCH --partition=big\n" in shown
    assert "#SBATCH --exclusive\n" in text(slurm={"exclusive": True})
    assert "#SBATCH --requeue" not in text(slurm={"no-requeue": True})
    assert "--cpus-per-task=4\n" in text(ranks=4)
    assert "--cpus-per-task=8\n" in text(ranks="gpu", devices=8), "a CPU for each rank"
    assert "--cpus-per-task" not in text(ranks=4, slurm={"exclusive": True}).partition("\n\n")[0]
    shown = text(slurm={"qos": "no", "kill-on-invalid-dep": "yes"})
    assert "#SBATCH --qos=no\n#SBATCH --kill-on-invalid-dep=yes\n" in shown, "their values are Slurm's"
    with pytest.raises(Refused, match="line end"):
        text(slurm={"mail-user": "a\nb"})


@pytest.mark.parametrize(("seconds", "shown"), [(1, "0-00:00:01"), (59.2, "0-00:01:00"), (90061, "1-01:01:01")])
def test_durations(seconds: float, shown: str) -> None:
    assert batch_script.duration(seconds) == shown


@pytest.mark.parametrize(
    ("gres", "found"),
    [
        ("gpu:2", 2), ("gpu:a100:4(S:0-1)", 4), ("(null)", 0), ("gpu:0", 0), ("gpu:a100:2,gpu:h100:1,nic:1", 3),
        ("gpu:2(IDX:0-1)", 2), ("craynetwork:4", 0),
    ],
)  # fmt: skip
def test_gpus_of_a_node(gres: str, found: int) -> None:
    assert gpus(gres) == found


def test_why_a_job_waits() -> None:
    assert reasons.waiting("(Resources)", "7", None) == "the resources that it asks for are in use (Slurm: Resources)"
    assert "scontrol release 7" in reasons.waiting("JobHeldUser", "7", None)
    assert "estimated start: " in reasons.waiting("Priority", "7", time.time() + 3600)
    assert "Slurm has not started it (Slurm: SomethingNew)" in reasons.waiting("SomethingNew", "7", None)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("QOSMaxJobsPerUserLimit", "its QOS allows one user no more jobs at the same time"),
        ("AssocMaxJobsLimit", "its account allows no more jobs at the same time"),
        ("QOSGrpSubmitJobsLimit", "its QOS allows no more jobs in the queue at the same time"),
        ("AssocGrpCpuLimit", "its account allows no more CPUs at the same time"),
        ("QOSMaxGRESPerUser", "its QOS allows one user no more GPUs (GRES) at the same time"),
        ("QOSMaxNodePerJobLimit", "it asks for more nodes than its QOS allows one job, so it does not start"),
        (
            "AssocMaxWallDurationPerJobLimit",
            "it asks for more time than its account allows one job, so it does not start",
        ),
        ("QOSMinGRES", "its QOS wants more GPUs (GRES) than it asks for"),
        ("AssocGrpCPUMinutesLimit", "its account has used up its minutes of CPUs"),
        ("QOSGrpCPURunMinutesLimit", "the running jobs of its QOS take all its minutes of CPUs"),
        ("QOSGrpWallLimit", "its QOS has used up its time"),
        ("QOSUsageThreshold", "a limit of its QOS is reached"),
        ("QOSNotAllowed", "its QOS may not be used in this partition"),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "nodes that it needs are down, drained or reserved",
        ),
    ],
)
def test_limits_of_a_qos_or_an_account(word: str, said: str) -> None:
    assert reasons.waiting(word, "7", None) == f"{said} (Slurm: {word})"


@given(st.text())
def test_any_reason_is_one_line(word: str) -> None:
    assert isinstance(reasons.waiting(word, "7", None), str)


def test_a_folder_becomes_a_job_in_one_step(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    one, other = jobs.new("it"), jobs.new("that")
    assert jobs.find("it") is None and list(jobs) == []
    made = jobs.settle(one)
    assert made is not None and jobs.find("it") is not None
    again = jobs.new("it")
    assert jobs.settle(again) is None
    jobs.discard(again)
    jobs.discard(other)
    for number in ("7", "7", "9"):
        made.add_id(number)
    assert made.ids == ["7", "9"]
    for start in (Start("9", 0), Start("7", 1), Start("7", 0)):
        made.part(start, 0).mkdir(parents=True)
    assert made.starts == [Start("7", 0), Start("7", 1), Start("9", 0)]
    jobs.remove(made)
    assert jobs.find("it") is None
    assert [path.name for path in jobs.path.iterdir()] == []
    for name in ("../x", ".hidden", "no/where"):
        assert jobs.find(name) is None


def test_a_job_folder_names_its_files(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "it")
    with pytest.raises(Refused, match="damaged or gone"):
        folder.read()
    assert (folder.ids, folder.starts) == ([], [])
