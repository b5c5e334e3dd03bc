"""The state of a job, from its object and its pods."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from paceline.backends.kubernetes.api.times import moment
from paceline.backends.kubernetes.look.describe import described
from paceline.backends.kubernetes.look.jobs import Found, explain
from paceline.backends.kubernetes.look.pods import seen
from paceline.backends.kubernetes.manifests.kinds.job import BatchJob
from paceline.backends.kubernetes.manifests.names import INSTANCE, SPEC, STOPPED
from paceline.backends.kubernetes.manifests.objects import PROGRAM, WORK
from paceline.job.job import Job

T = "2026-01-01T00:00:{:02}Z"
TAKEN = {"state": "STOPPED", "exit_code": 143}
DONE = {"state": "SUCCEEDED", "exit_code": 0, "ranks": [[0, 0]]}
FAILURE = {"rank": 1, "message": "ValueError: no", "cause": "exception", "traceback": ""}
CULPRIT = {"state": "FAILED", "exit_code": 1, "ranks": [[1, 1]], "failure": FAILURE, "error": "rank 1: ValueError: no"}
SUCCESS = {"conditions": [{"type": "Complete", "status": "True", "lastTransitionTime": T.format(9)}]}
FAILED = {
    "conditions": [{"type": "Failed", "status": "True", "lastTransitionTime": T.format(9), "message": "too many"}]
}


def pod(index: int, report: dict[str, Any] | None = None, code: int | None = None, phase: str = "Running") -> Any:
    """A pod: it runs, or has ended with a report or a code."""
    code = (report or {}).get("exit_code", code)
    state: dict[str, Any] = {"running": {"startedAt": T.format(1)}}
    if code is not None:
        phase = "Failed" if code else "Succeeded"
        ended = {"exitCode": code, "startedAt": T.format(1), "finishedAt": T.format(5)}
        state = {"terminated": {**ended, "message": json.dumps(report) if report else ""}}
    status = {"phase": phase, "containerStatuses": [{"name": "main", "state": {} if phase == "Pending" else state}]}
    labels = {INSTANCE: "it", "batch.kubernetes.io/job-completion-index": str(index)}
    meta = {"name": f"it-{index}-x", "creationTimestamp": T.format(0), "labels": labels}
    return seen({"metadata": meta, "spec": {"nodeName": "n", "containers": [{"name": "main"}]}, "status": status})


def found_of(*pods: Any, status: Any = None, plain: bool = False, stopped: bool = False, **spec: Any) -> Found:
    """A job of two nodes."""
    container = {"name": "main", "command": ["python3"] if plain else ["python3", PROGRAM]}
    found = Found(
        {
            "metadata": {
                "name": "it", "namespace": "ml", "creationTimestamp": T.format(0),
                "annotations": {SPEC: json.dumps(spec), **({STOPPED: T.format(8)} if stopped else {})},
            },
            "spec": {
                "completions": 2, "parallelism": 2, "suspend": stopped or bool(spec.get("queue")),
                "template": {"spec": {"containers": [container]}},
            },
            "status": status or {},
        },
        BatchJob(),
    )  # fmt: skip
    found.pods = list(pods)
    return found


def job_of(*pods: Any, **given: Any) -> Job:
    """The same, as verbs show it."""
    return described(found_of(*pods, **given), "kubernetes")


def state(*pods: Any, **given: Any) -> tuple[Any, ...]:
    """State, exit code, error or reason, and the states of the ranks of a job of two nodes."""
    job = job_of(*pods, **given)
    return job.state, job.exit_code, job.error or job.waiting, [rank.state for rank in job.instances]


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (state(), ("PENDING", None, "2 of 2 pods are not made yet", ["PENDING", "PENDING"])),
        (state(pod(0), pod(1, phase="Pending")), ("STARTING", None, None, ["RUNNING", "PENDING"])),
        (state(pod(0), pod(1)), ("RUNNING", None, None, ["RUNNING", "RUNNING"])),
        (state(pod(0, code=0), pod(1), plain=True), ("RUNNING", None, None, ["SUCCEEDED", "RUNNING"])),
        (
            state(pod(0, code=0), pod(1, code=3), plain=True),
            ("RUNNING", None, "node 1 (it-1-x): exit code 3", ["SUCCEEDED", "FAILED"]),
        ),
        (
            state(pod(0, code=0), pod(1, code=3), plain=True, status=FAILED),
            ("FAILED", 3, "node 1 (it-1-x): exit code 3", ["SUCCEEDED", "FAILED"]),
        ),
        (state(queue="q"), ("PENDING", None, "queue q has not admitted it yet", ["PENDING", "PENDING"])),
        (state(pod(0), pod(1), stopped=True), ("RUNNING", None, "it is being stopped", ["RUNNING", "RUNNING"])),
        (state(stopped=True), ("STOPPED", 143, None, ["STOPPED", "STOPPED"])),
        (state(status=SUCCESS), ("SUCCEEDED", 0, None, ["SUCCEEDED", "SUCCEEDED"])),
        (state(pod(0, DONE), status=SUCCESS), ("SUCCEEDED", 0, None, ["SUCCEEDED", "SUCCEEDED"])),
        (
            state(pod(0, TAKEN), pod(1, CULPRIT), status=FAILED),
            ("FAILED", 1, "rank 1: ValueError: no", ["STOPPED", "FAILED"]),
        ),
        (
            state(pod(0), pod(1, code=137), status=FAILED),
            ("FAILED", 137, "node 1 (it-1-x): exit code 137", ["FAILED", "FAILED"]),
        ),
    ],
)
def test_the_state_follows_from_the_object_and_the_pods(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    assert found == wanted


def test_a_job_does_not_end_before_its_object() -> None:
    """Another pod may come for one that was lost."""
    assert state(pod(0), pod(1, CULPRIT))[0] == "RESTARTING"
    assert state(pod(0), pod(1, TAKEN))[0] == "RESTARTING"


def test_a_job_whose_pods_are_gone_was_taken_away() -> None:
    found, code, error, ranks = state(status=FAILED)
    assert (found, code, ranks) == ("FAILED", 143, ["STOPPED", "STOPPED"])
    assert "deleted, evicted or preempted" in error and error.endswith("(too many)")


def test_what_has_succeeded_stays_so_when_a_pod_comes_late() -> None:
    for late in (pod(1, phase="Pending"), pod(1), pod(1, TAKEN)):
        job = job_of(pod(0, DONE), late, nodes="1:2")
        assert (job.state, job.exit_code, job.waiting) == ("SUCCEEDED", 0, None)


def test_a_pod_that_never_began_ends_with_its_job() -> None:
    failed = replace(pod(0), phase="Failed", started=None, finished=None, exit_code=None, error="its init failed")
    job = job_of(failed, status=FAILED)
    assert (job.state, job.finished, job.error) == ("FAILED", moment(T.format(9)), "node 0 (it-0-x): its init failed")
    assert job.is_recent(job.finished) and not job.is_recent(job.finished + 1)


def test_a_checkpoint_that_went_with_its_pod_is_not_promised() -> None:
    for folder, has_ended, is_there in (
        (f"{WORK}/jobs/it/checkpoints", False, True),  # other pods have it too
        (f"{WORK}/jobs/it/checkpoints", True, False),
        ("/saved/here", True, True),
        ("/savedelsewhere", True, False),
    ):
        report = {**CULPRIT, "checkpoint": {"step": 7, "folder": folder}}
        data = [{"volume": "work", "path": "/saved"}]
        job = job_of(pod(0), pod(1, report), status=FAILED if has_ended else None, data=data)
        assert (job.checkpoint is not None) is is_there, folder


class Server:
    """A server that has these events: (second, type, reason, name of a pod or "it"), and these pods."""

    def __init__(self, events: list[tuple[int, str, str, str]], *pods: Any) -> None:
        self._events, self._pods = events, pods

    def path(self, version: str, plural: str) -> str:
        return plural

    def items(self, path: str, **params: str) -> Any:
        if path != "events":
            return self._pods
        return [
            {"metadata": {}, "type": kind, "reason": reason, "message": f"{reason} of {name}",
             "lastTimestamp": T.format(when),
             "involvedObject": {"kind": "Job" if name == "it" else "Pod", "name": name}}
            for when, kind, reason, name in self._events if params["fieldSelector"] == f"type={kind}"
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("events", "second", "wanted"),
    [
        ([(2, "Warning", "FailedCreate", "it")], 1, "FailedCreate of it"),
        ([(2, "Normal", "SuccessfulCreate", "it"), (2, "Warning", "FailedCreate", "it")], 1, "FailedCreate of it"),
        ([(2, "Warning", "FailedCreate", "it"), (3, "Normal", "SuccessfulCreate", "it")], 1, None),
        ([(2, "Warning", "FailedCreate", "it"), (3, "Normal", "Resumed", "it")], 1, None),
        ([(2, "Warning", "FailedCreate", "it")], 3, None),  # a pod was made since, and its event is not there
        ([(0, "Warning", "FailedCreate", "it")], 1, None),  # of a deleted job that had this name
        ([(2, "Warning", "FailedMount", "it-0-x")], 1, "node 0 (it-0-x): a volume cannot be mounted: FailedMount"),
        ([(2, "Warning", "FailedMount", "it-0-x"), (3, "Normal", "Pulling", "it-0-x")], 1, None),
    ],
)
def test_a_warning_counts_until_something_later_says_that_it_is_over(
    events: list[tuple[int, str, str, str]], second: int, wanted: str | None
) -> None:
    waits = {"phase": "Pending", "containerStatuses": [
        {"name": "main", "state": {"waiting": {"reason": "ContainerCreating"}}}
    ]}  # fmt: skip
    meta = {"name": "it-0-x", "creationTimestamp": T.format(second), "labels": {INSTANCE: "it"}}
    item = {"metadata": meta, "spec": {"containers": [{"name": "main"}]}, "status": waits}
    found = found_of(seen(item))
    found.object["metadata"]["creationTimestamp"] = T.format(1)
    explain(Server(events, item), found)  # type: ignore[arg-type]
    waiting = described(found, "kubernetes").waiting
    assert (waiting or "").startswith(wanted or "1 of 2 pods are not made yet")
