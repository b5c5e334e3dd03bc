"""Requests whose answers are lost, watches that the server ends, and code that is too large."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from tests.conftest import GENEROUS, eventually

from paceline.backends.kubernetes.api import client
from paceline.backends.kubernetes.api.client import Cluster
from paceline.backends.kubernetes.api.credentials import Access
from paceline.backends.kubernetes.api.errors import ApiError, Expired
from paceline.backends.kubernetes.manifests.kinds.job import BatchJob
from paceline.backends.kubernetes.manifests.order import Order
from paceline.backends.kubernetes.options import Options
from paceline.backends.kubernetes.start import submit
from paceline.job.errors import UserError
from paceline.job.spec import JobSpec

if TYPE_CHECKING:
    from collections.abc import Callable


PODS = "/api/v1/namespaces/ml/pods"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of a client, which are not waited for."""
    found: list[float] = []
    monkeypatch.setattr(client.time, "sleep", found.append)
    return found


def cluster(answer: Callable[[httpx2.Request], httpx2.Response]) -> Cluster:
    found = Cluster("lab", Options(), "")
    http = httpx2.Client(transport=httpx2.MockTransport(answer), base_url="https://lab")
    found._found = Access(http, "lab", "ml", "https://lab")
    return found


OWNED = {"ownerReferences": [{"uid": "own"}]}


@pytest.mark.parametrize(
    ("asked", "there", "is_own"),
    [
        (OWNED, OWNED, True),
        ({"annotations": {"id": "1"}}, {"annotations": {"id": "1", "more": "2"}}, True),
        (OWNED, {"ownerReferences": [{"uid": "other"}]}, False),
        ({"annotations": {"id": "1"}}, {"annotations": {"id": "2"}}, False),
        ({}, {}, False),
    ],
)
def test_what_was_made_although_the_answer_was_lost_is_found(
    pauses: list[float], asked: dict[str, Any], there: dict[str, Any], is_own: bool
) -> None:
    made = {"metadata": {"name": "it", "uid": "1", **there}}
    posts = 0

    def answer(request: httpx2.Request) -> httpx2.Response:
        nonlocal posts
        if request.method == "GET":
            assert request.url.path == f"{PODS}/it"
            return httpx2.Response(200, json=made)
        posts += 1
        if posts == 1:
            raise httpx2.ReadError("the server went away")
        return httpx2.Response(409, json={"reason": "AlreadyExists", "message": 'pods "it" already exists'})

    def create() -> dict[str, Any]:
        return cluster(answer).create(PODS, {"metadata": {"name": "it", **asked}})

    if is_own:
        assert create() == made
    else:
        with pytest.raises(ApiError, match="already exists"):
            create()


def test_an_object_is_made_although_others_change_the_quota_that_counts_it(pauses: list[float]) -> None:
    refusal = {"reason": "Conflict", "message": 'Operation cannot be fulfilled on resourcequotas "q"'}
    answers = iter([httpx2.Response(409, json=refusal), httpx2.Response(201, json={"metadata": {"name": "it"}})])
    made = cluster(lambda request: next(answers)).create(PODS, {"metadata": {"name": "it"}})
    assert (made, pauses) == ({"metadata": {"name": "it"}}, [0.2])


def test_a_pause_that_the_server_asks_for_is_no_longer_than_its_answer_is_waited_for(pauses: list[float]) -> None:
    there = cluster(lambda request: httpx2.Response(503, headers={"Retry-After": "600"}))
    with pytest.raises(ApiError):
        there.get(PODS)
    with pytest.raises(ApiError):
        list(there.log("it", "main", follow=False, since=None))
    assert pauses == []
    there.ask_on(lambda line: None, until=lambda: time.monotonic() + (-1 if len(pauses) == 3 else 1))
    with pytest.raises(ApiError):
        there.get(PODS)
    assert pauses == [15.0] * 3


def events(*found: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(it).encode() + b"\n" for it in found)


def test_a_watch_that_the_server_ends_is_begun_again_after_a_pause(pauses: list[float]) -> None:
    status: dict[str, Any] = {"code": 500, "message": "etcd"}
    bookmark = {"type": "BOOKMARK", "object": {}}
    texts = [events({"type": "ERROR", "object": status})] * 3
    texts.append(events(bookmark, {"type": "ERROR", "object": {**status, "details": {"retryAfterSeconds": 9}}}))
    answers = iter(texts)
    there = cluster(lambda request: httpx2.Response(200, content=next(answers)))
    assert [list(there.watch(PODS, "1")) for _ in texts] == [[], [], [], [("BOOKMARK", {})]]
    assert pauses == [0.2, 0.4, 0.8, 9.0]


@pytest.mark.parametrize(("code", "error"), [(410, Expired), (403, ApiError), (400, ApiError)])
def test_a_watch_that_no_pause_mends_ends(pauses: list[float], code: int, error: type[Exception]) -> None:
    text = events({"type": "ERROR", "object": {"code": code, "message": "no"}})
    with pytest.raises(error):
        list(cluster(lambda request: httpx2.Response(200, content=text)).watch(PODS, "1"))
    assert pauses == []


@pytest.mark.parametrize("what", ["busy", "no credentials"])
def test_a_mirror_says_that_nothing_new_is_known_until_the_server_answers_again(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(client, "_UNSIGNED", 0.1)
    monkeypatch.setenv("PACELINE_LOOK_TIMEOUT", "1s")
    failing = threading.Event()

    def answer(request: httpx2.Request) -> httpx2.Response:
        if failing.is_set():
            if what == "busy":
                return httpx2.Response(503)
            raise UserError("the program that signs has failed")
        if "watch" in request.url.params:
            failing.wait(GENEROUS)
            return httpx2.Response(200, text="")
        return httpx2.Response(200, json={"metadata": {"resourceVersion": "1"}, "items": []})

    there = cluster(answer)
    there.mirror()
    list(there.list(PODS))
    assert there.problem is None
    failing.set()
    eventually(lambda: there.problem, "it says so")
    failing.clear()
    eventually(lambda: there.problem is None, "it is well again")
    failing.set()


def test_packing_ends_as_soon_as_the_code_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit.objects, "MOST_CODE", 1 << 20)
    written = 0

    def packed(spec: Any, archive: io.BufferedIOBase, progress: Any) -> None:
        nonlocal written
        for _ in range(50):
            archive.write(os.urandom(1 << 20))
            written += 1

    monkeypatch.setattr(submit, "packed", packed)
    spec = JobSpec.validated({"script": "it.py", "code": {"mode": "snapshot"}})
    order = Order("it", spec, Options(), "ml", "1", kind=BatchJob())
    with pytest.raises(UserError, match=r"^the code has more than 1\.0 MiB when packed"):
        submit._with_files(cluster(lambda _: httpx2.Response(500)), order, submit._Silence())
    assert written < 4


@pytest.mark.parametrize("answer", ["it has failed", "it is gone"])
def test_a_job_that_the_cluster_has_ended_while_it_was_sent_is_not_submitted(answer: str) -> None:
    asked: list[str] = []
    failed = {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]}

    def answers(request: httpx2.Request) -> httpx2.Response:
        asked.append(f"{request.method} {request.url.path.rpartition('/')[2]}")
        made: dict[str, Any] = {"metadata": {"name": "it", "uid": "1"}}
        if request.method == "PATCH" and answer == "it is gone":
            return httpx2.Response(404, json={"reason": "NotFound", "message": 'jobs.batch "it" not found'})
        return httpx2.Response(200, json={**made, "status": failed} if request.method == "PATCH" else made)

    spec = JobSpec.validated({"script": "it.py", "image": "python"})
    order = Order("it", spec, Options(), "ml", "1", kind=BatchJob())
    with pytest.raises(UserError, match="sending the job took longer than 180 s"):
        submit._make(cluster(answers), order)
    assert asked[-2:] == ["PATCH it", "DELETE it"]
