"""What Slurm starts on a node: the agent's beginning, and the end of the batch script, without Slurm."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.late import job_spec

from paceline.contract.slurm import agreed_port
from paceline.node import ENTRY
from paceline.node.host.slurm.end import finish
from paceline.node.host.slurm.job_folder import JobFolder, Start
from paceline.node.host.slurm.job_folders import Jobs
from paceline.node.host.slurm.place import step
from paceline.node.journal.state import cached

from .test_slurm_view import NODE

if TYPE_CHECKING:
    from pathlib import Path

START = Start("7", 0)


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    jobs = Jobs(tmp_path)
    made = jobs.settle(jobs.new("it"))
    assert made is not None
    (made.path / "lives").mkdir()
    made.add_id("7")
    for name in ("sbatch", "scancel", "scontrol"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/calls\n')
        path.chmod(0o755)
    return made


def describe(folder: JobFolder, **more: Any) -> None:
    spec = {"secrets": [], "nodes": "2"}
    stored = {"job_id": "id", "created": 1.0, "spec": spec, "node": spec, "options": {}, "data": [], **more}
    folder.job.write_text(json.dumps(stored))


def start(folder: JobFolder, role: str, *args: str, **env: str) -> int:
    """The exit code of a role on the first of two nodes."""
    own = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost,n1", **env}
    path = f"{folder.path.parent.parent}/bin:{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    command = [sys.executable, ENTRY, role, str(folder.path), *args]
    return subprocess.run(command, env={**kept, **own, "PATH": path}, check=False).returncode


def is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("", port)):
        return True
    return False


def test_ports_are_none_that_linux_gives_to_connections() -> None:
    assert {20000 <= agreed_port(str(number)) < 32768 for number in range(2000)} == {True}


def test_a_port_that_is_taken(folder: JobFolder) -> None:
    describe(folder)
    steps = ((str(step), agreed_port("7", f"0.{step}")) for step in itertools.count())
    number, port = next(it for it in steps if is_free(it[1]))  # what runs beside the tests may have one
    ranks = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    step = {**ranks, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    with socket.create_server(("", port)):
        assert start(folder, "slurm", SLURM_STEP_ID=number, **step) == 2
    ((said, _),) = folder.refusals(START)
    assert f"cannot listen on port {port}, which follows from the number of the Slurm job" in said
    assert said.endswith("start it again to get another port: paceline resubmit it")


def test_a_chain_ends_with_a_job_that_never_trained(folder: JobFolder) -> None:
    describe(folder, options={"chain": True})
    folder.of(START).mkdir()
    (folder.of(START) / "warned").write_text("limit\n")
    assert start(folder, "slurm-finish", "143") != 0
    outcome = folder.outcome(START)
    assert outcome is not None and (outcome["next"], outcome["state"], outcome["exit_code"]) == (None, "FAILED", 124)
    assert outcome["cause"] == "time limit"
    assert outcome["why"] == "its time limit ended before its ranks had started; give it a longer --time-limit"
    assert not was_called(folder, "sbatch"), "no other job was submitted"


def was_called(folder: JobFolder, command: str) -> bool:
    return command in (folder.path.parent.parent / "calls").read_text().split()


def stopped(folder: JobFolder, number: str, saved: bool = False) -> None:
    """Let the ranks of a start have been stopped, as before a time limit."""
    folder.add_id(number)
    run = folder.part(Start(number, 0), 0) / "it"
    run.mkdir(parents=True)
    (folder.of(Start(number, 0)) / "warned").write_text("limit\n")
    spec = {**job_spec.JobSpec(script="train.py", nodes=2).for_node().to_json(), "name": "it"}
    (run / "job.json").write_text(json.dumps({"created": 1.0, "framework": None, "spec": spec}))
    (run / "spec.json").write_text(json.dumps({**NODE, "job_id": "id"}))
    status = {"state": "STOPPED", "exit_code": 143, "ranks": [], "attempt": 0, "start": {}, "agent": None}
    (run / "status.json").write_text(json.dumps(cached(status, 0)))
    if saved:
        (run / "saved.json").write_text('{"step": 5, "folder": "/there"}')


@pytest.mark.parametrize(
    ("saves", "goes_on"),
    [([], False), (["7"], False), (["8"], True), (["10"], True), (["own"], True), (["hidden"], False)],
)
def test_a_chain_goes_on_as_long_as_one_of_three_jobs_saves_something(
    folder: JobFolder, saves: list[str], goes_on: bool
) -> None:
    own = folder.path / "checkpoints"
    own.mkdir()
    places = {"working_dir": str(folder.path), "checkpoint_dir": "checkpoints"}
    describe(folder, options={"chain": True}, node=places)
    (own / "before.pt").touch()
    os.utime(own / "before.pt", (1.0, 1.0))
    for number in ("7", "8", "9", "10"):
        stopped(folder, number, number in saves)
    for name in ("own", "hidden"):
        if name in saves:
            (own / ("model.pt" if name == "own" else ".saving-step-000001-x")).touch()
    assert start(folder, "slurm-finish", "143", SLURM_JOB_ID="10") != 0
    outcome = folder.outcome(Start("10", 0)) or {}
    assert was_called(folder, "sbatch") == goes_on
    if not goes_on:
        assert (outcome["state"], outcome["exit_code"], outcome["cause"]) == ("FAILED", 124, "time limit")
        assert outcome["why"].startswith("its last 3 jobs of Slurm saved nothing, neither with paceline's library nor")


@pytest.mark.parametrize(
    ("shown", "state"),
    [
        ("RunTime=00:50:00 TimeLimit=01:00:00", "FAILED"), ("RunTime=01:00:10 TimeLimit=01:00:00", "FAILED"),
        ("", "FAILED"),
        ("RunTime=00:01:00 TimeLimit=1-00:00:00", "STOPPED"), ("RunTime=00:01:00 TimeLimit=UNLIMITED", "STOPPED"),
    ],
)  # fmt: skip
def test_a_signal_is_a_time_limit_only_if_that_is_near(folder: JobFolder, shown: str, state: str) -> None:
    describe(folder)
    stopped(folder, "7")
    folder.script.write_text("#!/bin/sh\n#SBATCH --signal=B:USR2@540\n")
    (folder.path.parent.parent / "bin" / "scontrol").write_text(f"#!/bin/sh\necho '   {shown} TimeMin=N/A'\n")
    assert start(folder, "slurm-finish", "143") != 0
    outcome = folder.outcome(START) or {}
    assert outcome["state"] == state
    said = "stopped at its time limit in Slurm" if state == "FAILED" else "stopped by a signal, USR2, that was not"
    assert outcome["why"].startswith(said) and outcome["why"].endswith("; paceline resubmit it starts it again")


def test_after_a_time_limit_a_checkpoint_is_promised_if_there_is_one(folder: JobFolder) -> None:
    describe(folder)
    stopped(folder, "7", saved=True)
    start(folder, "slurm-finish", "143")
    assert (folder.outcome(START) or {})["why"].endswith("; paceline resubmit it goes on from its last checkpoint")


@pytest.mark.parametrize(("state", "is_decided"), [("PENDING", False), ("NODE_FAIL", False), ("RUNNING", True)])
def test_slurm_decides_when_it_has_killed_the_agents(folder: JobFolder, state: str, is_decided: bool) -> None:
    describe(folder)
    (folder.path.parent.parent / "bin" / "scontrol").write_text(f"#!/bin/sh\necho JobState={state} Restarts=0\n")
    run = folder.part(START, 0) / "it"
    run.mkdir(parents=True)
    spec = {**job_spec.JobSpec(script="train.py").for_node().to_json(), "name": "it"}
    (run / "spec.json").write_text(json.dumps(spec))
    agent = {"pid": 1, "host": "n0", "boot": "x", "start_time": 1}
    status = {"job": "it", "state": "RUNNING", "ranks": [], "agent": agent, "attempt": 0}
    (run / "status.json").write_text(json.dumps(cached(status, 0)))
    assert start(folder, "slurm-finish", "137") != 0
    assert (folder.outcome(START) is not None) == is_decided


@pytest.mark.parametrize(
    ("cause", "message", "losses", "follows"),
    [
        ("node lost", "n1 does not answer", 0, "requeue"), ("node lost", "n1 does not answer", 4, "requeue"),
        ("node lost", "n1 does not answer", 5, None), ("exit", "node 1 (n1) is gone", 0, None),
    ],
)  # fmt: skip
def test_the_cause_of_a_failure_decides_whether_slurm_requeues_the_job(
    folder: JobFolder, cause: str, message: str, losses: int, follows: str | None
) -> None:
    describe(folder)
    for number in range(losses):
        before = folder.of(Start("7", number))
        before.mkdir()
        (before / "outcome.json").write_text(json.dumps({"cause": "node lost", "next": "requeue", "time": 1.0}))
    now = Start("7", losses)
    run = folder.part(now, 0) / "it"
    run.mkdir(parents=True)
    spec = {**job_spec.JobSpec(script="train.py").for_node().to_json(), "name": "it"}
    (run / "spec.json").write_text(json.dumps(spec))
    (run / "job.json").write_text(json.dumps({"created": 1.0, "framework": None, "spec": spec}))
    failure = {"rank": None, "message": message, "cause": cause}
    status = {"state": "FAILED", "ranks": [], "agent": None, "attempt": 0, "exit_code": 1, "finished": 2.0}
    (run / "status.json").write_text(json.dumps(cached({**status, "failure": failure}, 0)))
    scontrol = folder.path.parent.parent / "bin" / "scontrol"
    scontrol.write_text("#!/bin/sh\nkill -KILL $PPID\n")  # as Slurm ends what it requeues
    start(folder, "slurm-finish", "1", SLURM_RESTART_COUNT=str(losses))
    outcome = folder.outcome(now)
    assert outcome is not None and outcome["next"] == follows
    assert ("this has happened 6 times" in outcome.get("why", "")) == (losses == 5)


def test_slurm_takes_a_while_to_end_what_ran_in_an_allocation(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe(folder)
    slept: list[float] = []
    shown = lambda: f"JobState={'COMPLETING' if sum(slept) < 60 else 'CANCELLED'}"  # noqa: E731
    monkeypatch.setattr(finish, "scontrol_job", shown)
    monkeypatch.setattr(step, "time", SimpleNamespace(sleep=slept.append))
    outcome = step._outcome(folder, START, 143)
    assert outcome["state"] == "STOPPED" and "cancelled in Slurm, not by paceline" in outcome["why"]
