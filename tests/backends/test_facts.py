"""The facts that programs decide by are those of the record of a job, whatever ran it; commands are quoted."""

from __future__ import annotations

import shlex
import time
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
        (job("STOPPED", exit_code=143), "stopped", "resubmit", "resubmit --on lab it"),
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


def test_an_odd_name_is_quoted() -> None:
    """Names of jobs are checked where they are made, but a damaged folder may have any."""
    found = of(job("FAILED", name="a b; c", cause="node lost", error="gone"))
    assert shlex.split(found["mend"]["command"]) == ["paceline", "resubmit", "--on", "lab", "a b; c"]
