"""`paceline resubmit`: what may change, and that no work is lost on the way."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from paceline.backends.again import kept_there
from paceline.backends.registry import load
from paceline.job.spec import JobSpec

if TYPE_CHECKING:
    from subprocess import CompletedProcess

    from tests.conftest import Paceline

TRAIN = """
    import sys, torch, paceline
    run = paceline.init(seed=1, checkpoint_every=5, progress=False)
    model = run.setup(torch.nn.Linear(4, 1))
    loader = run.dataloader(torch.utils.data.TensorDataset(torch.zeros(80, 4), torch.arange(80)), batch_size=2)
    for epoch in run.epochs(1):
        for x, y in loader:
            run.backward(model(x).sum())
            print("used", *y.tolist(), flush=True)
            if run.step == 11 and "die" in sys.argv:
                raise SystemExit(3)
    print("arguments", sys.argv[1:])
"""


def submitted(paceline: Paceline, *args: str, code: int = 0) -> str:
    done = paceline.succeeds(*args)
    name = str(done.stdout.strip())
    assert paceline("wait", name).returncode == code, paceline("logs", name).stdout
    return name


def planned(done: CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    spec: dict[str, Any] = json.loads(done.stdout)["job"]
    return spec


def used(paceline: Paceline, name: str, until: int | None = None) -> list[int]:
    """The samples of all steps, or of the first so many of each rank."""
    samples = []
    for path in (paceline.home / "jobs" / name / "logs" / "0").glob("rank-*.log"):
        lines = re.findall(r"^used (.*)$", path.read_text(), re.M)
        samples += [int(word) for line in lines[:until] for word in line.split()]
    return sorted(samples)


@pytest.mark.torch
@pytest.mark.parametrize("where", ["flag", "script", "outside"])
def test_fresh_begins_anew_wherever_the_checkpoints_are(paceline: Paceline, where: str) -> None:
    folder = "ck" if where != "outside" else str(paceline.folder / "ck")
    given = "" if where == "flag" else f"checkpoint_dir={folder!r}, "
    paceline.script(TRAIN.replace("init(", f"init({given}"))
    flag = ("--checkpoint-dir", folder) if where == "flag" else ()
    first = submitted(
        paceline, "submit", "--sync-mode", "snapshot", *flag, "--name", "it", "script.py", "die", code=3
    )  # fmt: skip
    again = paceline("resubmit", "--fresh", first, "--", "x")
    if where == "outside":
        assert (again.returncode, again.stderr.count("\n")) == (2, 1)
        assert f"--fresh: there are checkpoints in {folder}, and the job would resume from them" in again.stderr
        return
    assert again.returncode == 0, again.stderr
    assert paceline("wait", "it-2").returncode == 0
    assert used(paceline, "it-2") == list(range(80))


def test_flags_change_a_job(paceline: Paceline) -> None:
    paceline.script("print('ran')")
    first = submitted(
        paceline, "submit", "-n", "2", "--env", "A=1", "--label", "team=a", "--name", "it", "script.py", "old"
    )
    paceline.env.update(PET_NPROC_PER_NODE="7", PET_MAX_RESTARTS="9")  # these are for new jobs
    spec = planned(paceline("resubmit", "--dry-run", first))
    same = {
        "ranks": 2,
        "env": {"A": "1"},
        "args": ["old"],
        "max_restarts": 0,
        "resume_from": "it",
        "labels": {"team": "a"},
    }
    assert {name: spec[name] for name in same} == same
    flags = [
        "-n", "3", "--env", "B=2", "--time-limit", "2h", "--label", "team=b", "--max-restarts", "4", "--name", "other",
        "--cpus", "1", "--", "--lr", "0.1",
    ]  # fmt: skip
    spec = planned(paceline("resubmit", "--dry-run", first, *flags))
    changed = {
        "ranks": 3, "env": {"A": "1", "B": "2"}, "time_limit": "2h", "labels": {"team": "b"}, "max_restarts": 4,
        "name": "other", "args": ["--lr", "0.1"], "cpus": 1,
    }  # fmt: skip
    assert {name: spec[name] for name in changed} == changed
    assert planned(paceline("resubmit", "--dry-run", "-np", "4", first))["ranks"] == 4
    stored = paceline.home / "jobs" / "it" / "job.json"
    job = json.loads(stored.read_text())
    stored.write_text(json.dumps({**job, "spec": {**job["spec"], "ttl": 90, "time_limit": 5400.5}}))
    spec = planned(paceline("resubmit", "--dry-run", first))
    assert (spec["ttl"], spec["time_limit"]) == ("90s", "5400.5s"), "in seconds, as it is stored"
    for flag, said in (
        (["-n", "x"], "-n x is neither a number nor auto, gpu or cpu"),
        (["--nnodes", "2"], "--nnodes 2 needs to know where the nodes meet"),
        (["--working-dir", "/tmp"], "No such option '--working-dir'"),
        (["--memory", "16"], "did you mean 16G?"),
        (["--option", "color=red"], "--option color: local has no such option; leave it out"),
        (["--slurm", "qos=high"], "--slurm is for jobs on slurm; add --on slurm"),
    ):
        done = paceline("resubmit", *flag, first)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr
    assert submitted(paceline, "resubmit", "-n", "1", first) == "it-2"
    assert submitted(paceline, "resubmit", "it-2") == "it-3"


@pytest.mark.torch
def test_a_job_goes_on_with_other_ranks_and_arguments(paceline: Paceline) -> None:
    pytest.importorskip("torch")
    paceline.script(TRAIN)
    first = submitted(paceline, "submit", "-n", "2", "--name", "it", "script.py", "die", code=3)
    before = used(paceline, first, until=10)
    again = paceline("resubmit", "-n", "1", first, "--", "other").stdout.strip()
    assert paceline("delete", first).returncode == 0, "the new job does not need the old one"
    assert paceline("wait", again).returncode == 0
    assert before + used(paceline, again) == list(range(80)), "each sample once"
    assert "arguments ['other']" in (paceline.home / "jobs" / again / "logs/0/rank-0.log").read_text()
    events = {event["event"]: event for event in paceline.json("events", again)}
    folder = paceline.home / "jobs" / again / "checkpoints"
    assert events["submitted"]["resume_from"] == paceline.json("get", again)["resume_from"] == first
    assert events["resumed"]["step"] == 10
    assert events["resumed"]["path"].startswith(f"{folder}/")


@pytest.mark.torch
def test_a_job_whose_checkpoints_are_gone_does_not_begin_anew_unasked(paceline: Paceline) -> None:
    pytest.importorskip("torch")
    paceline.script(TRAIN)
    folder = paceline.folder / "mine"
    flags = ("--checkpoint-dir", "mine", "--name", "it")
    submitted(paceline, "submit", *flags, "script.py", "die", code=3)
    refused = paceline("resubmit", "--fresh", "it")
    assert refused.returncode == 2
    assert f"--fresh: there are checkpoints in --checkpoint-dir {folder}" in refused.stderr
    shutil.move(folder, paceline.folder / "moved")
    lost = submitted(paceline, "resubmit", "it", "--", "x", code=1)
    error = paceline.json("get", lost)["error"]
    assert f"this job has saved step 10, and there is no checkpoint in {folder} any more" in error
    assert f"paceline resubmit --fresh {lost}" in error
    assert used(paceline, lost) == []
    shutil.rmtree(folder)
    shutil.move(paceline.folder / "moved", folder)
    back = submitted(paceline, "resubmit", lost)
    assert used(paceline, "it", until=10) + used(paceline, back) == list(range(80))
    shutil.rmtree(folder)
    fresh = submitted(paceline, "resubmit", "--fresh", lost)
    assert paceline.json("get", fresh)["resume_from"] is None
    assert used(paceline, fresh) == list(range(80))


@pytest.mark.torch
def test_a_folder_that_another_job_uses_is_not_deleted(paceline: Paceline) -> None:
    pytest.importorskip("torch")
    paceline.script(TRAIN)
    submitted(paceline, "submit", "--name", "old", "script.py", "die", code=3)
    checkpoints = paceline.home / "jobs" / "old" / "checkpoints"
    submitted(paceline, "submit", "--name", "user", "--checkpoint-dir", str(checkpoints), "script.py")
    assert used(paceline, "user")[0] == 20, "it has gone on"
    for verb in (["delete", "old"], ["delete", "--force", "old"]):
        done = paceline(*verb)
        assert done.returncode == 2
        assert done.stderr.endswith("job user keeps its checkpoints in the folder of job old; delete user first\n")
    assert paceline("prune", "--since", "0s", "--state", "FAILED").returncode == 1
    assert any(checkpoints.glob("step-*"))
    assert paceline("delete", "user").returncode == 0
    assert paceline("delete", "old").returncode == 0
    assert not checkpoints.exists()


@pytest.mark.torch
def test_what_is_saved_and_the_way_on_are_said(paceline: Paceline) -> None:
    pytest.importorskip("torch")
    paceline.script(TRAIN)
    done = paceline.run("--name", "it", "script.py", "die")
    assert done.returncode == 3
    way = "paceline: step 10 is saved; go on from there with: paceline resubmit it"
    assert done.stderr.splitlines()[-1] == way
    assert paceline("wait", "it").stderr.splitlines()[-1] == way
    assert paceline("logs", "-f", "it").stderr.splitlines()[-1] == way
    folder = paceline.home / "jobs" / "it" / "checkpoints"
    assert f"checkpoint   step 10, in {folder}\n" in paceline("get", "it").stdout
    paceline.script("raise SystemExit(3)", "other.py")
    assert "go on" not in paceline.run("other.py").stderr


def test_options_of_another_backend_are_left_out_and_said() -> None:
    """A job that goes on on a backend of another kind has no use for the options of its first one."""
    there = {name: load(name) for name in ("slurm", "kubernetes")}
    spec = JobSpec(script="it.py", options={"chain": True, "slurm": {"partition": "gpu"}})
    said: list[str] = []
    assert kept_there(spec, there["slurm"], load("slurm"), said.append).options == spec.options
    assert said == []
    assert kept_there(spec, there["slurm"], there["kubernetes"], said.append).options == {}
    assert said == ["options of slurm, which mean nothing to kubernetes, are left out: chain, slurm"]
