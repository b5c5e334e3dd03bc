"""The state of a Slurm job, from what its nodes recorded and what Slurm reports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from tests.late import job_spec

from paceline.node.errors import Refused
from paceline.node.host.slurm.job_folder import JobFolder, Start
from paceline.node.host.slurm.look import describe, logs
from paceline.node.journal.state import cached
from paceline.node.logs.query import LogQuery
from paceline.node.store.home import Home

from .test_slurm_queue import job, line, squeue

if TYPE_CHECKING:
    from pathlib import Path

SPEC = {**job_spec.JobSpec(script="train.py", nodes=2).for_node().to_json(), "name": "it"}
NODE = {
    "framework": "torch", "expected": None, "nodes": 2, "least": 2, "nproc": 1, "max_restarts": 0, "grace": 30.0,
    "program": {"kind": "script", "target": "train.py", "args": []}, "working_dir": "/", "hosts": [], "job_id": "abc",
}  # fmt: skip
FIRST, SECOND = Start("7", 0), Start("7", 1)


class Cluster:
    """A job whose Slurm number is 7."""

    def __init__(self, folder: Path) -> None:
        self.rows = folder / "rows"
        self.rows.touch()
        self.it = job(folder, spec=SPEC, created=1.0, options={"slurm": {}}, data=[], node={"working_dir": "/"})
        self.it.add_id("7")

    def lists(self, state: str, **columns: str) -> None:
        """Let squeue list the job."""
        row = {"JobID": "7", "State": state, "RestartCnt": "0", "Comment": "paceline:abc", **columns}
        self.rows.write_text(line(**row) + "\n")

    def node(self, rank: int, state: str, start: Start = FIRST, *, attempt: int = 0, **status: Any) -> None:
        """Let a node have recorded a state."""
        run = self.it.part(start, rank) / "it"
        run.mkdir(parents=True)
        agent = {"pid": 1, "host": f"n{rank}", "boot": "x", "start_time": 1}
        members = [{"id": f"agent {number}"} for number in range(2)]
        joined = {"attempt": attempt, "node_rank": rank, "nodes": members}
        known = {"state": state, "agent": agent, "ranks": [], "attempt": attempt, "node_rank": rank, "nodes": 2}
        (run / "job.json").write_text(
            json.dumps({"created": 1.0, "framework": None, "spec": {**SPEC, "queue": "main"}})
        )
        (run / "spec.json").write_text(json.dumps(NODE))
        (run / "status.json").write_text(json.dumps(cached({**known, "start": joined, "finished": 2.0, **status}, 0)))

    def decides(self, start: Start = FIRST, **outcome: Any) -> None:
        """Let the batch script of a start have decided what follows."""
        self.it.of(start).mkdir(exist_ok=True)
        (self.it.of(start) / "outcome.json").write_text(json.dumps({"next": None, "time": 3.0, **outcome}))

    def shown(self) -> dict[str, Any]:
        """What a client is shown."""
        (found,) = describe.slurm_describe(Home(self.it.root), {"names": ["it"], "since": None})["jobs"]
        return dict(found)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(tmp_path)
    squeue(tmp_path, monkeypatch, f"cat {made.rows}")
    return made


@pytest.mark.parametrize(
    ("word", "state", "why", "cause"),
    [
        ("RUNNING", "STARTING", None, None),
        ("CANCELLED", "STOPPED", "it was cancelled in Slurm before it started", None),
        ("TIMEOUT", "FAILED", "it reached its time limit in Slurm before it started", "time limit"),
        ("NODE_FAIL", "FAILED", "a node of it failed before it started", "node lost"),
    ],
)
def test_before_a_node_has_written_anything(
    slurm: Cluster, word: str, state: str, why: str | None, cause: str | None
) -> None:
    slurm.lists(word, Partition="gpu")
    found = slurm.shown()
    assert (found["state"], found["error"], found["cause"], found["queue"]) == (state, why, cause, "gpu")
    assert found["exit_code"] == {"FAILED": 1, "STOPPED": 128 + signal.SIGTERM}.get(state)


def test_a_job_that_waits(slurm: Cluster) -> None:
    slurm.lists("PENDING", Reason="Priority")
    assert "higher priority come first (Slurm: Priority)" in slurm.shown()["waiting"]
    slurm.it.stop.touch()
    assert slurm.shown()["state"] == "PENDING", "it has not left the queue yet"


@pytest.mark.parametrize("reason", ["JobLaunchFailure", "RaisedSignal:53(Real-time_signal_19)"])
def test_a_node_that_cannot_open_the_output_is_named_with_the_folder(slurm: Cluster, reason: str) -> None:
    slurm.lists("FAILED", Reason=reason, BatchHost="n5")
    error = slurm.shown()["error"]
    assert error.startswith(f"n5 could not start its batch script; most likely it does not see {slurm.it.root}")


@pytest.mark.parametrize(
    ("word", "restarts", "state", "waiting"),
    [
        ("RUNNING", "0", "RUNNING", None),
        ("SUSPENDED", "0", "RUNNING", "Slurm has suspended it (Slurm: SUSPENDED)"),
        ("PENDING", "1", "RESTARTING", "Slurm has requeued it; "),
        ("RUNNING", "1", "RESTARTING", "Slurm has requeued it"),
        ("NODE_FAIL", "0", "FAILED", None),
        ("OUT_OF_MEMORY", "0", "FAILED", None),
        ("CANCELLED", "0", "STOPPED", None),
        ("COMPLETED", "0", "SUCCEEDED", None),
    ],
)
def test_while_the_nodes_say_that_it_runs(
    slurm: Cluster, word: str, restarts: str, state: str, waiting: str | None
) -> None:
    for rank in range(2):
        slurm.node(rank, "RUNNING")
    slurm.lists(word, RestartCnt=restarts, Reason="BeginTime" if word == "PENDING" else "")
    found = slurm.shown()
    assert found["state"] == state
    assert (found["waiting"] or "").startswith(waiting or "") and bool(found["waiting"]) == bool(waiting)
    causes = {"NODE_FAIL": "node lost", "OUT_OF_MEMORY": "out of memory"}
    assert found["cause"] == causes.get(word)


def test_a_job_that_has_failed_on_its_nodes_may_go_on(slurm: Cluster) -> None:
    failure = {"rank": 1, "message": "ValueError: no", "cause": "exception"}
    for rank in range(2):
        slurm.node(rank, "FAILED", exit_code=1, failure=failure)
    slurm.lists("RUNNING")
    assert slurm.shown()["state"] == "RESTARTING", "its batch script has not decided yet"
    slurm.decides()
    found = slurm.shown()
    assert (found["state"], found["error"], found["exit_code"]) == ("FAILED", "rank 1: ValueError: no", 1)
    assert found["cause"] == "exception"


@pytest.mark.parametrize(
    ("word", "restarts", "state", "said"),
    [
        ("RUNNING", "0", "RESTARTING", "Slurm preempted it"),
        ("PENDING", "1", "RESTARTING", "Slurm preempted it; its begin time has not come"),
        ("CANCELLED", "1", "STOPPED", "Slurm preempted it, then it was cancelled in Slurm"),
        ("NODE_FAIL", "1", "FAILED", "Slurm preempted it, then a node of it failed"),
    ],
)
def test_a_job_that_its_batch_script_has_requeued(
    slurm: Cluster, word: str, restarts: str, state: str, said: str
) -> None:
    slurm.node(0, "STOPPED", exit_code=143)
    slurm.decides(next="requeue", why="Slurm preempted it")
    slurm.lists(word, RestartCnt=restarts, Reason="BeginTime" if word == "PENDING" else "")
    found = slurm.shown()
    assert found["state"] == state and (found["waiting"] or found["error"]).startswith(said)


LATER = "1800000000"


@pytest.mark.parametrize(("recorded", "finished"), [(False, float(LATER)), (True, 2.0)])
def test_slurm_says_when_a_job_has_ended_whose_nodes_could_not(slurm: Cluster, recorded: bool, finished: float) -> None:
    for rank in range(2):
        slurm.node(rank, "STOPPED" if recorded and rank == 0 else "RUNNING", exit_code=143)
    slurm.lists("CANCELLED", EndTime=LATER)
    assert slurm.shown()["finished"] == finished
    slurm.rows.write_text("")  # some minutes later
    for path in (slurm.it.of(FIRST), slurm.it.path / "ids"):
        os.utime(path, (1.0, 1.0))
    (slurm.it.root / "queue.json").unlink()
    assert slurm.shown()["finished"] == finished


def test_a_job_that_is_stopped_while_it_is_requeued_ends_then(slurm: Cluster) -> None:
    slurm.node(0, "FAILED", exit_code=1)
    slurm.decides(next="requeue", why="Slurm preempted it")
    slurm.it.stop.touch()
    slurm.lists("CANCELLED", RestartCnt="1", EndTime=LATER)
    found = slurm.shown()
    assert (found["state"], found["finished"], found["kept_since"]) == ("STOPPED", float(LATER), float(LATER))


def test_ranks_to_which_slurm_sent_the_signal_itself_were_stopped(slurm: Cluster) -> None:
    ranks = [{"name": f"it-{rank}", "rank": rank, "pid": 5, "exit_code": code, "state": "FAILED"}
             for rank, code in ((0, 143), (1, 1))]  # fmt: skip
    for rank in range(2):
        slurm.node(rank, "STOPPED", exit_code=143, ranks=ranks[rank : rank + 1])
    slurm.decides()
    assert [it["state"] for it in slurm.shown()["instances"]] == ["STOPPED", "FAILED"]


def test_a_node_that_refuses_the_job(slurm: Cluster) -> None:
    slurm.node(0, "STARTING", SECOND, attempt=3)
    slurm.it.part(SECOND, 1).mkdir()
    (slurm.it.part(SECOND, 1) / "refused").write_text("n1: no GPU")
    slurm.decides(SECOND)
    found = slurm.shown()
    assert (found["state"], found["exit_code"], found["error"], found["cause"]) == (
        "FAILED",
        2,
        "n1: no GPU",
        "refused",
    )


def test_a_job_that_its_node_refuses_has_ended_when_it_did(slurm: Cluster) -> None:
    part = slurm.it.part(FIRST, 0)
    part.mkdir(parents=True)
    (part / "refused").write_text("torch is not installed")
    for decided in (False, True):
        if decided:
            slurm.decides(state="FAILED", exit_code=2, time=(part / "refused").stat().st_mtime + 1)
        slurm.lists("FAILED")
        shown = slurm.shown()
        assert (shown["state"], shown["error"]) == ("FAILED", "torch is not installed")
        assert abs(shown["finished"] - (part / "refused").stat().st_mtime) < 5
        request = {"names": None, "since": shown["finished"] - 60}
        assert [it["name"] for it in describe.slurm_describe(Home(slurm.it.root), request)["jobs"]] == ["it"]


def test_a_node_that_an_elastic_job_has_lost_does_not_count(slurm: Cluster) -> None:
    slurm.node(0, "RUNNING", attempt=1)
    slurm.node(
        1, "RUNNING", ranks=[{"name": "it-worker-1", "rank": 1, "state": "RUNNING", "pid": 5, "exit_code": None}]
    )
    run = slurm.it.part(FIRST, 0) / "it" / "status.json"
    status = json.loads(run.read_text())
    run.write_text(json.dumps({**status, "nodes": 1, "start": {**status["start"], "nodes": [{"id": "agent 0"}]}}))
    slurm.lists("RUNNING")
    found = slurm.shown()
    assert (found["state"], found["attempt"], found["instances"]) == ("RUNNING", 1, [])


def test_while_slurm_does_not_answer_the_nodes_are_believed(slurm: Cluster, tmp_path: Path) -> None:
    slurm.node(0, "RUNNING")
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    assert slurm.shown()["state"] == "RUNNING"


@pytest.mark.parametrize(
    ("ranks", "follows", "why"),
    [
        ((0, 1), False, None),
        ((2,), False, "rank 2 of job it wrote no log yet; correct -i"),
        ((2,), True, None),
        ((0, 7), True, "job it has ranks 0 … 3, not rank 7; correct -i"),
    ],
)
def test_the_ranks_of_a_log_may_be_on_several_nodes(
    slurm: Cluster, ranks: tuple[int, ...], follows: bool, why: str | None
) -> None:
    for rank in range(2):
        slurm.node(rank, "RUNNING")
        run = slurm.it.part(FIRST, rank) / "it"
        (run / "spec.json").write_text(json.dumps({**NODE, "nproc": 2}))
        (run / "logs" / "0").mkdir(parents=True)
        for name in ("times", f"rank-{rank}.log"):
            (run / "logs" / "0" / name).touch()
    with contextlib.nullcontext() if why is None else pytest.raises(Refused, match=why):
        logs._check(slurm.it, LogQuery(ranks=ranks, follow=follows))


def test_the_folder_of_a_job(slurm: Cluster) -> None:
    slurm.lists("PENDING", Reason="Priority")
    found = slurm.shown()
    assert JobFolder(slurm.it.path).path.samefile(found["folder"])
    assert (found["external_id"], found["command"], found["nodes"]) == ("7", "train.py", 2)
