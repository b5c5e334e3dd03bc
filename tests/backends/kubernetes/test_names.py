"""What a job is told from that had its name before, and what is not known of its pods."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx2
import pytest

from paceline.backends.kubernetes.api.client import Cluster
from paceline.backends.kubernetes.api.credentials import Access
from paceline.backends.kubernetes.backend import Kubernetes
from paceline.backends.kubernetes.look import events, inside
from paceline.backends.kubernetes.look.jobs import find
from paceline.backends.kubernetes.look.logs import Follower
from paceline.backends.kubernetes.manifests.names import SPEC, labels_of
from paceline.backends.kubernetes.manifests.objects import PROGRAM
from paceline.backends.kubernetes.options import Options
from paceline.job.errors import UserError

JOBS, PODS = "/apis/batch/v1/namespaces/ml/jobs", "/api/v1/namespaces/ml/pods"
MADE = "2026-01-01T00:00:{:02}Z"


def job(uid: str = "new", **status: Any) -> dict[str, Any]:
    container = {"name": "main", "command": ["python3", PROGRAM]}
    annotations = {SPEC: json.dumps({"name": "it", "nodes": 1, "ranks": 1})}
    meta = {"name": "it", "uid": uid, "resourceVersion": "1", "creationTimestamp": MADE.format(30)}
    return {
        "metadata": {**meta, "namespace": "ml", "labels": labels_of("it"), "annotations": annotations},
        "spec": {"completions": 1, "parallelism": 1, "template": {"spec": {"containers": [container]}}},
        "status": status,
    }


def pod(name: str, made: int, state: dict[str, Any], phase: str) -> dict[str, Any]:
    labels = {**labels_of("it"), "batch.kubernetes.io/job-completion-index": "0"}
    return {
        "metadata": {"name": name, "creationTimestamp": MADE.format(made), "labels": labels},
        "spec": {"nodeName": "n", "containers": [{"name": "main"}]},
        "status": {"phase": phase, "containerStatuses": [{"name": "main", "state": state}]},
    }


OLD = pod("old", 10, {"terminated": {"exitCode": 0, "finishedAt": MADE.format(20), "message": ""}}, "Succeeded")
RUNNING = pod("new", 31, {"running": {"startedAt": MADE.format(32)}}, "Running")


class Server:
    """An API server with a Job and pods; it notes what is changed."""

    def __init__(self, *pods: dict[str, Any]) -> None:
        self.jobs, self.pods = [job()], list(pods)
        self.changed: list[str] = []
        self.backend = Kubernetes("lab", Options(), " --on lab")
        http = httpx2.Client(transport=httpx2.MockTransport(self._answer), base_url="https://lab")
        self.backend._cluster._found = Access(http, "lab", "ml", "https://lab")

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        if request.method != "GET":
            self.changed.append(request.method)
            return httpx2.Response(200, json=self.jobs[0])
        if "watch" in request.url.params:
            self.jobs = [job("later")]
            return httpx2.Response(200, text=json.dumps({"type": "MODIFIED", "object": self.jobs[0]}) + "\n")
        items = {JOBS: self.jobs, PODS: self.pods}.get(request.url.path)
        if items is None:
            return httpx2.Response(404, json={"reason": "NotFound", "message": "there is none"})
        return httpx2.Response(200, json={"metadata": {"resourceVersion": "1"}, "items": items})


def test_a_pod_that_a_deleted_job_of_the_name_has_left_is_not_of_the_new_one() -> None:
    server = Server(OLD)
    found = server.backend.describe(["it"]).jobs[0]
    assert (found.state, found.exit_code) == ("PENDING", None)
    server.pods.append(RUNNING)
    assert [it.name for it in find(server.backend._cluster, ["it"])["it"].pods] == ["new"]


def test_who_follows_a_job_does_not_go_on_with_a_later_one_of_its_name() -> None:
    server = Server()
    follower: Follower[str] = Follower(server.backend._cluster, "it", lambda pod: ["a line"])
    assert list(follower._watch()) == []
    assert follower.job_is_over.is_set() and server.jobs[0]["metadata"]["uid"] == "later"


def test_a_job_whose_pods_do_not_say_what_they_have_saved_is_not_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*args: Any) -> Any:
        raise UserError("pod new does not answer: forbidden")

    monkeypatch.setattr(inside, "answer_of", silent)
    server = Server(RUNNING)
    monkeypatch.setattr(Cluster, "is_mirrored", True)  # a page has asked them just before
    server.backend._answers["it"] = time.monotonic(), {}
    with pytest.raises(UserError, match=r"whether job it has saved .* not known: pod new does not answer: forbidden; "):
        server.backend.suspend(["it"])
    assert server.changed == []
    found = find(server.backend._cluster, ["it"])["it"]
    assert [*events.history(server.backend._cluster, found, 0.0).warnings][:1] == ["pod new does not answer: forbidden"]
