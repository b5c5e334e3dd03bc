"""How what nodes have written of a job comes to a machine that does not see their disks."""

from __future__ import annotations

import json
import os
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import GENEROUS
from tests.late import job_spec

from paceline.node import ENTRY
from paceline.node.errors import Refused
from paceline.node.host.slurm import cleanup, cluster, logs, mirror, transfer, verbs
from paceline.node.host.slurm.folder import JobFolder, Life
from paceline.node.host.slurm.jobs import Jobs
from paceline.node.host.slurm.queue import Queue
from paceline.node.store.home import Home

from .test_slurm_queue import command, job, line, squeue

if TYPE_CHECKING:
    from pathlib import Path

LIFE = Life("7", 0)
OUTCOME = '{"next": null, "state": "STOPPED", "time": 1.0, "host": "n0"}'


@pytest.fixture
def it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobFolder:
    """A job whose nodes share no disk, as the login node has it."""
    spec = {**job_spec.JobSpec(script="train.py").for_node(), "name": "it"}
    known = {"spec": spec, "created": 1.0, "data": [], "node": {"working_dir": "/"}}
    made = job(tmp_path, options={"broadcast": True, "slurm": {}}, **known)
    made.add_id("7")
    squeue(tmp_path, monkeypatch, f"cat {tmp_path}/rows 2>/dev/null")
    assert cluster.asked(made.root, GENEROUS) == "here"
    return made


def node(tmp_path: Path, name: str, printed: str = "", job_id: str = "abc") -> Path:
    """The folder of the job on the disk of a node."""
    folder = tmp_path / name / "slurm" / "it"
    (folder / "lives" / str(LIFE)).mkdir(parents=True)
    (folder / "id").write_text(f"{job_id}\n")
    (folder / "slurm.out").write_text(printed)
    return folder


def bring(it: JobFolder, node: Path, mode: str = "all", **env: str) -> str:
    """Bring what a node has; returns why that failed."""
    step = [sys.executable, ENTRY, "slurm-send", str(node), str(LIFE), mode]
    return transfer.pull(it, LIFE, step, env={**os.environ, **env})


@pytest.mark.parametrize("job_id", ["", "another"])
def test_a_node_that_has_no_files_of_the_job_is_not_complete(it: JobFolder, tmp_path: Path, job_id: str) -> None:
    it.of(LIFE).mkdir(parents=True)
    (it.of(LIFE) / "outcome.json").write_text(OUTCOME)
    folder = tmp_path / "n0/slurm/it"
    if job_id:
        assert node(tmp_path, "n0", "secret of another job", job_id) == folder
    assert f"has no files of the job in {folder} any more" in bring(it, folder)
    assert not (it.of(LIFE) / transfer.COMPLETE).exists() and not it.output.exists()
    assert folder.exists() == bool(job_id)
    assert bring(it, node(tmp_path, "n1")) == "" and (it.of(LIFE) / transfer.COMPLETE).exists()


def test_what_several_first_nodes_printed_is_kept(it: JobFolder, tmp_path: Path) -> None:
    first, second = node(tmp_path, "n0", "the first start, on n0\n"), node(tmp_path, "n1", "on n1\n")
    assert bring(it, first) == ""
    with open(first / "slurm.out", "a") as file:
        file.write("preempted\n")
    assert bring(it, first) == ""
    assert it.output.read_text() == "the first start, on n0\npreempted\n"
    assert bring(it, second) == ""
    assert it.output.read_text() == "the first start, on n0\npreempted\non n1\n"
    with open(second / "slurm.out", "a") as file:
        file.write("and on\n")
    assert bring(it, second) == bring(it, second) == ""
    assert it.output.read_text() == "the first start, on n0\npreempted\non n1\nand on\n"


def test_only_the_first_node_sends_what_batch_scripts_print(it: JobFolder, tmp_path: Path) -> None:
    other = node(tmp_path, "n1", "of an earlier start\n")
    assert bring(it, other, "last") == bring(it, other, "others") == ""
    assert bring(it, other, "now", SLURM_PROCID="1") == "" and not it.output.exists()


def test_the_nodes_run_what_was_sent_to_them(it: JobFolder, tmp_path: Path) -> None:
    command(tmp_path, "srun", "exit 0")
    assert [sys.executable, ENTRY] == transfer.command(it, LIFE, "now")[-6:-4]
    it.job.write_text(json.dumps({**it.read(), "program": ["/old/python", "/old/paceline.pyz"]}))
    assert transfer.command(it, LIFE, "now")[-6:-4] == ["/old/python", "/old/paceline.pyz"]


def test_nodes_of_another_cluster_are_not_asked(it: JobFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("srun", "sbatch"):
        command(tmp_path, name, f"touch {tmp_path}/asked-{name}")
    it.of(LIFE).mkdir(parents=True)
    (it.of(LIFE) / "outcome.json").write_text(OUTCOME)
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/that.conf")
    command(tmp_path, "scontrol", "echo ClusterName = that")
    there = "its nodes do not see this disk, and it is in the Slurm cluster here, and this machine belongs to that"
    assert there in mirror.out_of_reach(it, Queue(it.root))
    assert there in mirror.bring(it, it.root)
    with pytest.raises(Refused, match="cannot be deleted from here: its nodes do not see this disk"):
        cleanup.remove(Jobs(it.root), it)
    (it.of(LIFE) / "outcome.json").unlink()
    home = Home(it.root)
    for module in (logs, verbs):
        monkeypatch.setattr(module, "end_with_stdin", lambda: None)
    with pytest.raises(Refused, match="that job it ends is not seen here: its nodes do not see this disk"):
        list(verbs.slurm_wait(home, {"names": ["it"]}))
    with pytest.raises(Refused, match="job it may have printed more: its nodes do not see this disk"):
        list(logs.slurm_logs(home, {"name": "it", "choice": {"ranks": None, "follow": True}}))
    assert it.job.exists() and not list(tmp_path.glob("asked-*"))
    (it.of(LIFE) / "outcome.json").write_text(OUTCOME)
    (it.of(LIFE) / transfer.COMPLETE).touch()
    assert mirror.bring(it, it.root) == "", "all that the nodes had is here"


@pytest.fixture
def cancelled(it: JobFolder, tmp_path: Path) -> list[Path]:
    """The nodes of the job, which was ended with Slurm's commands, so that its batch script has said nothing."""
    steps = f'exec "{sys.executable}" "{ENTRY}" slurm-send "{tmp_path}/$host/slurm/it" "$3" "$4"'
    command(
        tmp_path,
        "srun",
        f"for it; do case $it in --nodelist=*) host=${{it#*=}};; esac; done; echo $host >> {tmp_path}/fetched\n"
        f'while [ "$1" != slurm-send ]; do shift; done; {steps}',
    )
    rows = f'case "$*" in *NodeList*) echo "n[0-1]";; *) cat {tmp_path}/rows;; esac'
    command(tmp_path, "squeue", rows)
    (tmp_path / "rows").write_text(line(JobID="7", State="CANCELLED", RestartCnt="0", Comment="paceline:abc") + "\n")
    nodes = [node(tmp_path, name, f"printed on {name}\n") for name in ("n0", "n1")]
    for rank, folder in enumerate(nodes):
        log = folder / "lives" / str(LIFE) / str(rank) / "it" / "0.log"
        log.parent.mkdir(parents=True)
        log.write_text(f"rank {rank}\n")
    return nodes


def test_logs_of_a_job_that_slurm_ended_come_from_all_its_nodes(
    it: JobFolder, tmp_path: Path, cancelled: list[Path]
) -> None:
    for _ in range(2):
        assert mirror.bring(it, it.root) == ""
    assert [(it.of(LIFE) / f"{rank}/it/0.log").read_text() for rank in range(2)] == ["rank 0\n", "rank 1\n"]
    assert it.output.read_text() == "printed on n0\n"
    assert (tmp_path / "fetched").read_text() == "n0\nn1\n", "once"


def test_a_node_that_cannot_be_reached_afterwards_is_named(it: JobFolder, cancelled: list[Path]) -> None:
    cancelled[1].rename(cancelled[1].with_name("away"))
    said = mirror.bring(it, it.root)
    assert f"is on n1 in {it.of(LIFE)}, and was not fetched" in said
    cancelled[1].with_name("away").rename(cancelled[1])
    assert mirror.bring(it, it.root) == ""


def test_nodes_that_slurm_does_not_know_any_more(it: JobFolder, tmp_path: Path, cancelled: list[Path]) -> None:
    command(tmp_path, "squeue", f"case $* in *NodeList*) exit 1;; *) cat {tmp_path}/rows;; esac")
    assert mirror.bring(it, it.root) == "", "as far as is known, it has never run"
    it.of(LIFE).mkdir(parents=True)
    assert "it is not known any more which" in mirror.bring(it, it.root)
    assert not (tmp_path / "fetched").exists()


def test_a_step_that_hangs_ends_with_all_that_it_has_started(it: JobFolder, tmp_path: Path) -> None:
    command(tmp_path, "srun", "sleep 100000 & wait")
    pull = threading.Thread(
        target=lambda: transfer.pull(it, LIFE, [str(tmp_path / "bin/srun")], seconds=0.2), daemon=True
    )
    pull.start()
    pull.join(GENEROUS)
    assert not pull.is_alive()


def test_jobs_whose_nodes_hang_share_the_time_of_a_list(
    it: JobFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(tmp_path, "srun", "exit 0")
    clock, steps, have_begun = [0.0], [], threading.Barrier(mirror._AT_ONCE)

    def hangs(*_: Any, seconds: float) -> str:
        steps.append(seconds)
        have_begun.wait(GENEROUS)
        clock[0] = seconds
        return "it was ended"

    monkeypatch.setattr(mirror, "pull", hangs)
    monkeypatch.setattr(mirror, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    folders, rows = [], []
    for number in range(20):
        folder = JobFolder(it.path.with_name(f"it-{number}"))
        (folder.path / "lives").mkdir(parents=True)
        folder.job.write_text(it.job.read_text().replace("abc", f"abc{number}"))
        folder.add_id(str(100 + number))
        rows.append(line(JobID=str(100 + number), State="RUNNING", RestartCnt="0", Comment=f"paceline:abc{number}"))
        folders.append(folder)
    (tmp_path / "rows").write_text("\n".join(rows) + "\n")
    mirror.refresh(folders, Queue(it.root, 0.0))
    assert steps == [mirror.SECONDS] * mirror._AT_ONCE


def test_jobs_that_others_bring_share_the_time_of_a_list(it: JobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((10.0, 10.0, 40.0, 60.0))
    monkeypatch.setattr("paceline.node.host.slurm.queue.time", SimpleNamespace(monotonic=lambda: next(times)))
    queue = Queue(it.root)
    assert [queue.left(45.0) for _ in range(3)] == [45.0, 15.0, 0.0]


def test_when_a_job_was_looked_at_is_told_by_the_disk(it: JobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    look = it.path / "looked"
    look.touch()
    monkeypatch.setattr("paceline.node.host.slurm.mirror.time.time", lambda: 0.0)
    assert mirror._age(it, look) < GENEROUS
