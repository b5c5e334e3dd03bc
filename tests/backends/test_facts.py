"""The facts that programs decide by are those of the record of a job, whatever ran it; commands are quoted."""

from __future__ import annotations

import shlex
import time
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.backends.facts import facts
from paceline.job.job import Instance, Job

NOW = time.time()
PROGRESS = {
    "time": NOW - 1, "epoch": 0, "step": 120, "steps_per_minute": 600.0, "began": NOW - 100, "metrics": {"loss": 0.5}
}  # fmt: skip
TRACEBACK = """Traceback (most recent call last):
  File "/work/train.py", line 31, in <module>
    main()
  File "/work/data.py", line 7, in main
    np.load("x")
  File "/usr/lib/python3.11/site-packages/numpy/npyio.py", line 405, in load"""
SETUP = "setup failed on h2 with exit code 127: module load nope: module: command not found"
IMAGE = "node 0 (it-0): image registry/none:1 cannot be pulled: not found; check its name, and --pull-secret"
FLAKY = {"event": "hang", "time": NOW, "hang": {
    "line": "rank 1 on h2 has not entered all_reduce 7", "ranks": [1], "seconds": 60.0,
    "places": [{"stack": [("/lib/python3.11/threading.py", 320, "wait"), ("train.py", 9, "load")]}],
}}  # fmt: skip


def job(state: str = "RUNNING", **changes: Any) -> Job:
    instances = tuple(Instance(f"it-{rank}", f"h{rank + 1}", rank, state) for rank in range(2))
    known: dict[str, Any] = {
        "name": "it", "state": state, "backend": "lab", "framework": "torch", "nodes": 2, "ranks": 2, "attempt": 0,
        "exit_code": None, "created": NOW - 200, "started": NOW - 150, "finished": None, "instances": instances,
        "error": None,
    }  # fmt: skip
    return Job(**{**known, **changes})


def of(found: Job, *happened: dict[str, Any]) -> Any:
    return facts(found, lambda: happened, " --on lab")


def test_a_job_that_steps_says_since_when_how_fast_and_with_which_loss() -> None:
    found = of(job(progress=PROGRESS))
    steps = found["steps"]
    assert (steps["is_stepping"], steps["per_minute"]) == (True, 600.0)
    assert steps["since"] < steps["last"]
    assert found["loss"] == {"name": "loss", "value": 0.5, "is_finite": True}
    assert found["diagnosis"] is found["mend"] is None


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests run long after this file was imported."""
    monkeypatch.setattr("paceline.backends.facts.time", SimpleNamespace(time=lambda: NOW))


@pytest.mark.parametrize(
    ("found", "is_stepping"),
    [
        (job(), None),
        (job("LOST", error="h1 does not answer", progress=PROGRESS), None),
        (job("SUCCEEDED", progress=PROGRESS), False),
        (job(progress={**PROGRESS, "time": NOW - 90}), False),
        (job(progress={**PROGRESS, "time": NOW - 90, "steps_per_minute": 2.0}), True),
    ],
    ids=["no library", "lost", "over", "still", "slow steps"],
)
def test_whether_it_steps(found: Job, is_stepping: bool | None) -> None:
    assert of(found)["steps"]["is_stepping"] is is_stepping


def test_a_hang_names_the_rank_and_the_line_of_the_script() -> None:
    found = of(job(waiting="it hangs: rank 1 on h2 has not entered all_reduce 7", progress=PROGRESS), FLAKY)
    diagnosis = found["diagnosis"]
    assert (diagnosis["kind"], diagnosis["rank"], diagnosis["node"], diagnosis["place"]) == (
        "hang", 1, "h2", "train.py:9"
    )  # fmt: skip
    assert found["steps"]["is_stepping"] is False
    assert (found["mend"]["first"], found["mend"]["command"]) == (
        "paceline stop --on lab it", "paceline resubmit --on lab it"
    )  # fmt: skip


def test_a_traceback_gives_the_line_of_the_script_and_not_that_of_a_library() -> None:
    found = of(job("FAILED", cause="exception", error="rank 1: E", traceback={"rank": 1, "text": TRACEBACK}))
    assert (found["diagnosis"]["place"], found["diagnosis"]["node"]) == ("/work/data.py:7", "h2")
    assert (found["mend"]["action"], found["mend"]["first"]) == ("edit", None)


@pytest.mark.parametrize(
    ("found", "kind", "action", "command"),
    [
        (job("FAILED", cause="node lost", error="node 1 is gone"), "node lost", "resubmit", "resubmit --on lab it"),
        (job("FAILED", cause="out of memory", error="rank 0: killed: out of memory", ranks=8), "out of memory",
         "use less memory", "resubmit --on lab -n 2 it"),
        (job("STOPPED", exit_code=143), "stopped", "none", None),
        (job("FAILED", cause="setup", error=SETUP), "setup", "correct the job", None),
        (job("STOPPED", cause="preempted", error="by Slurm"), "preempted", "resubmit", "resubmit --on lab it"),
        (job(progress={**PROGRESS, "metrics": {"train_loss": None}}), "loss not finite", "edit",
         "resubmit --on lab --fresh it"),
        (job("PENDING", waiting="2 jobs are before it"), "waiting", "wait", "wait --on lab it"),
        (job("PENDING", waiting=IMAGE), "wrong image", "correct the image", "resubmit --on lab it"),
        (job(slow=("data at train.py:3: num_workers=4 would save 1 s",)), "slow", "edit", "resubmit --on lab it"),
        (job("FAILED", cause="exception", error="E", code={"path": "/x"}), "exception", "edit", None),
        (job("FAILED", cause="elsewhere", error="it runs on h9"), "elsewhere", "look there", None),
    ],
)  # fmt: skip
def test_a_kind_of_fault_has_its_action(found: Job, kind: str, action: str, command: str | None) -> None:
    known = of(found)
    assert (known["diagnosis"]["kind"], known["mend"]["action"]) == (kind, action)
    assert known["mend"]["command"] == (command and f"paceline {command}")


def test_an_address_is_no_place_of_the_script() -> None:
    evidence = "cannot reach node 0 at h1.lab:29500 within 40 s (timed out)"
    found = of(job("FAILED", cause="nodes missing", error=evidence))
    assert found["diagnosis"]["place"] is None


def test_a_failed_setup_names_its_command_and_node() -> None:
    found = of(job("FAILED", cause="setup", error=SETUP))
    assert (found["diagnosis"]["about"], found["diagnosis"]["node"]) == ("module load nope", "h2")
    assert "paceline resubmit --on lab it" in found["mend"]["do"]
    ended = of(job("FAILED", cause="setup", error="setup failed on h1 as the command ended the shell: exec true"))
    assert (ended["diagnosis"]["about"], ended["diagnosis"]["node"]) == ("exec true", "h1")


@pytest.mark.parametrize(
    ("found", "do"),
    [
        (job("FAILED", cause="exit", error="rank 1: exit code 3"), "read what paceline why --on lab it says, and"),
        (job("FAILED", cause="exception", error="rank 1: E at train.py:3"), "correct the script at train.py:3"),
        (job("PENDING", waiting="2 jobs are before it"), None),
        (job("STOPPED", exit_code=143), "only if your user wants that, with paceline resubmit --on lab it"),
        (job("STOPPED", cause="preempted", error="by Slurm"), None),
    ],
)
def test_what_to_do_is_not_what_the_evidence_says(found: Job, do: str | None) -> None:
    said = of(found)["mend"]["do"]
    assert said is None if do is None else do in said, said


def test_a_loss_of_a_job_whose_steps_nothing_counts() -> None:
    found = of(job(progress={"time": NOW, "epoch": 0, "step": 0, "metrics": {"loss": 0.5}}))
    assert found["steps"] == {"is_stepping": None, "since": None, "per_minute": None, "last": None}
    assert found["loss"] == {"name": "loss", "value": 0.5, "is_finite": True}


def test_where_a_loss_ceased_to_be_finite_is_not_known() -> None:
    found = of(job(progress={**PROGRESS, "metrics": {"loss": None}}))
    assert found["diagnosis"]["evidence"] == "loss is not finite in epoch 1, at step 120 or before"
    assert "any of its checkpoints" in found["mend"]["do"]


def test_an_odd_name_is_quoted() -> None:
    """Names of jobs are checked where they are made, but a damaged folder may have any."""
    found = of(job("FAILED", name="a b; c", cause="node lost", error="gone"))
    assert shlex.split(found["mend"]["command"]) == ["paceline", "resubmit", "--on", "lab", "a b; c"]
