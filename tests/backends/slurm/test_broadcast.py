"""Jobs for nodes that share no disk: what their batch script does on a node, and what is refused before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually

from paceline.node import ENTRY
from paceline.node.host.slurm.folder import COMMENT
from paceline.node.host.slurm.parcel import Receiver

from .fake import Login

if TYPE_CHECKING:
    from pathlib import Path

SENT = ("--sync-mode", "snapshot", "--sync-source", "project")


class Cluster(Login):
    """A login node whose jobs are sent; its disk is that of the only node, unless `leave` is called."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.root = folder / "root"
        self.place = self.root / "slurm" / "it"
        (folder / "project").mkdir()

    def submit(self, *flags: str) -> Path:
        """The batch script of a job, outside of the root."""
        self.script("pass", "project/train.py")
        done = self("submit", "--on", "lab", "--broadcast", "--name", "it", *SENT, *flags, "train.py")
        assert done.returncode == 0, done.stderr
        kept = self.folder / "batch.sh"
        kept.write_bytes((self.place / "batch.sh").read_bytes())
        return kept

    def send(self, *, is_wanted: bool) -> None:
        """Set whether jobs are sent in the settings of the target."""
        self.settings("")
        settings = self.folder / "paceline.toml"
        settings.write_text(f"{settings.read_text()}broadcast = {str(is_wanted).lower()}\n")

    def leave(self) -> None:
        """From now on this is another machine's disk, on which there is nothing."""
        self.root.rename(self.folder / "left")

    def run(self, script: Path, **env: str) -> str:
        """Run a batch script as Slurm does; returns how scontrol was called."""
        (self.folder / "calls").unlink(missing_ok=True)
        own = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "PACELINE_TOKEN": "t", **env}
        subprocess.run(["sh", str(script)], env={**self.env, **own}, check=False, cwd="/", capture_output=True)
        return "\n".join(call for call in self.calls if call.startswith("scontrol update"))

    def end(self) -> None:
        """Let the job have ended on nodes n0 and n1."""
        life = self.place / "lives" / "7.0"
        life.mkdir()
        (life / "outcome.json").write_text('{"next": null, "state": "STOPPED", "time": 1.0, "nodes": "n[0-1]"}')


@pytest.fixture
def login(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_a_node_gets_the_job(login: Cluster) -> None:
    script = login.submit()
    login.leave()
    login.run(script)
    assert (login.place / "job.json").exists() and (login.place / "code/it/train.py").read_text() == "pass"
    assert len(list(login.root.glob("*.pyz"))) == 1
    before = (login.place / "job.json").stat().st_ino
    login.run(script, SLURM_RESTART_COUNT="1")
    assert (login.place / "job.json").stat().st_ino == before, "the job's own folder is used again"


def test_another_job_on_a_node_is_left_as_it_is(login: Cluster) -> None:
    script = login.submit()
    login.leave()
    login.place.mkdir(parents=True)
    (login.place / "id").write_text("abc\n")
    (login.place / "checkpoints").mkdir()
    old = login.root / "slurm" / "it.v1.old"
    old.mkdir()
    assert f"{login.place} has the files of another job there; give this one another --name" in login.run(script)
    assert (login.place / "checkpoints").exists() and not (login.place / "job.json").exists()
    (login.place / "id").unlink()
    assert "has the files of another job" in login.run(script)
    assert (login.place / "checkpoints").exists()
    (login.place / "checkpoints").rmdir()
    login.run(script)
    assert (login.place / "job.json").exists(), "an empty folder is nobody's"
    assert old.exists()


def test_a_job_that_was_deleted_may_be_replaced_on_a_node(login: Cluster) -> None:
    login.submit()
    old = (login.place / "id").read_text()
    login.end()
    assert login("delete", "--on", "lab", "it").returncode == 0
    script = login.submit()
    login.leave()
    login.place.mkdir(parents=True)
    (login.place / "id").write_text(old)
    (login.place / "old").touch()
    login.run(script)
    assert (login.place / "job.json").exists() and not (login.place / "old").exists()


def test_a_node_that_shares_the_disk_all_the_same(login: Cluster) -> None:
    script = login.submit()
    before = (login.place / "job.json").stat().st_ino
    login.run(script)
    assert (login.place / "job.json").stat().st_ino == before and (login.place / "ids").read_text() == "7\n"
    assert [path.name for path in login.place.parent.iterdir()] == ["it"]
    (login.place / "slurm.out").write_text("said")
    command = [sys.executable, ENTRY, "slurm-send", str(login.place), "7.0", "now"]
    known = json.dumps({"job_id": (login.place / "id").read_text().strip()}).encode() + b"\n"
    sent = subprocess.run(command, input=known, stdout=subprocess.PIPE, check=True).stdout
    receiver = Receiver(login.folder / "other", ())
    for line in sent.splitlines():
        receiver.add(line)
    assert (receiver.ended, receiver.tasks) == (1, 1)
    assert not (login.folder / "other").exists(), "nothing has to be sent to where it is"


@pytest.mark.parametrize("part", ["root", "root/slurm"])
def test_a_path_on_a_node_that_others_may_change(login: Cluster, part: str) -> None:
    script = login.submit()
    login.leave()
    login.place.parent.mkdir(parents=True)
    (login.folder / part).chmod(0o777)
    said = login.run(script)
    assert f"others may change {login.folder / part} (see its owner and mode); use chown or chmod go-w" in said
    assert not list(login.root.glob("*.pyz")) and not (login.place / "id").exists()
    (login.folder / part).chmod(0o755)
    login.run(script)
    assert (login.place / "job.json").exists()


def test_a_script_that_was_submitted_by_hand(login: Cluster) -> None:
    script = login.submit()
    login.leave()
    assert "has the script of another one; to run that again: paceline resubmit it" in login.run(
        script, PACELINE_TOKEN=""
    )
    assert not login.root.exists()


def test_the_agent_in_a_container(login: Cluster) -> None:
    login.command("apptainer", "exit 0")
    login.command("srun", 'while case "$1" in --*) true ;; *) false ;; esac; do shift; done; exec "$@"')
    script = login.submit("--containers", "apptainer", "--image", "/nowhere/image.sif")
    (archive,) = login.root.glob("*.pyz")
    login.leave()
    login.run(script)
    (call,) = [call for call in login.calls if call.startswith("apptainer")]
    assert call.endswith(f"/nowhere/image.sif python3 {archive} slurm {login.place}")
    assert archive.exists()


def test_checkpoints_that_a_resubmitted_job_would_not_see(login: Cluster) -> None:
    login.submit()
    login.end()
    for is_wanted in (False, True):
        login.send(is_wanted=is_wanted)
        done = login("resubmit", "--on", "lab", "it", "--name", "again")
        assert done.returncode == 2 and "job it are on its nodes' own disks" in done.stderr, done.stderr
    stored = json.loads((login.place / "job.json").read_text())
    stored["options"]["broadcast"] = False
    stored["spec"]["options"] = {}
    (login.place / "job.json").write_text(json.dumps(stored))
    done = login("resubmit", "--on", "lab", "it", "--name", "again")
    assert done.returncode == 2 and f"job it are in {login.place}, and with broadcast" in done.stderr, done.stderr
    assert login.jobs() == ["it"]
    assert login("resubmit", "--on", "lab", "it", "--name", "anew", "--fresh").returncode == 0
    login.send(is_wanted=False)
    assert login("resubmit", "--on", "lab", "it", "--name", "again").returncode == 0


def test_what_is_on_the_nodes_alone(login: Cluster) -> None:
    work = ("--working-dir", "/nowhere/code", "--containers", "apptainer", "--image", "/nowhere/image.sif")
    done = login("submit", "--on", "lab", "--broadcast", "--name", "it", *work, "train.py")
    assert done.returncode == 0, done.stderr


def test_a_job_whose_checkpoints_stay_behind_is_not_requeued(login: Cluster) -> None:
    login.settings("requeue = true")
    found = login.directives("--broadcast")
    assert "--no-requeue" in found and "--requeue" not in found
    assert "--requeue" in login.directives("--broadcast", "--checkpoint-dir", "/shared")
    assert "name a disk that all nodes see with --checkpoint-dir" in login.refusal("--broadcast", "--slurm", "requeue")


def test_nodes_remove_a_deleted_job_one_by_one(login: Cluster) -> None:
    login.submit()
    login.end()
    asked = login.folder / "asked"
    login.command(
        "sbatch", f'text=$(cat); echo "$text" >> {asked}; case "$text" in *nodelist=n0*) echo no >&2; exit 1;; esac'
    )
    done = login("delete", "--on", "lab", "it")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"job it is deleted, but n0 keep {login.place}: sbatch: no; remove it there by hand" in done.stderr
    lines = asked.read_text().splitlines()
    assert [line for line in lines if "nodelist" in line] == ["#SBATCH --nodelist=n0", "#SBATCH --nodelist=n1"]
    assert lines.count("#SBATCH --nodes=1") == 2
    assert login.jobs() == []


def test_nodes_remove_a_job_whose_client_was_interrupted(login: Cluster) -> None:
    asked, go, removal = (login.folder / name for name in ("asked", "go", "removal"))
    os.mkfifo(go)
    login.command(
        "sbatch",
        f'case "$*" in *test-only*) exit 0;; *export*) touch {asked}; cat {go}; echo 7;; *) cat > {removal};; esac',
    )
    login.command("squeue", 'case "$*" in *--jobs=7*) echo n1;; esac')
    login.script("pass", "project/train.py")
    client = login.start("submit", "--on", "lab", "--broadcast", "--name", "it", *SENT, "train.py")
    eventually(asked.exists, "sbatch was called")
    client.send_signal(signal.SIGKILL)
    client.communicate()
    go.write_text("")
    eventually(lambda: login.jobs() == [], "its folder is removed")
    assert "scancel --quiet 7" in login.calls
    assert "#SBATCH --nodelist=n1" in removal.read_text() and COMMENT not in removal.read_text()
