"""The lab's server answers as a real one does, word for word where words are known."""

from __future__ import annotations

import contextlib
import http.client as http_client
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from fake_kubernetes.client import Http

from .support import CONFIG, job

if TYPE_CHECKING:
    from collections.abc import Callable

    from fake_kubernetes.cluster import Cluster

JOBS, CONFIGS = "/apis/batch/v1/namespaces/default/jobs", "/api/v1/namespaces/default/configmaps"
PODS = "/api/v1/namespaces/default/pods"
SLEEPING = job("sleep 1000", suspend=True)


def changed(object: dict, **fields: object) -> dict:
    """A Job with other fields in its specification, or another name."""
    copy = json.loads(json.dumps(object))
    copy["metadata"]["name"] = fields.pop("name", copy["metadata"]["name"])
    copy["spec"].update(fields)
    return copy


def test_refusals(cluster: Cluster) -> None:
    http, nobody, stranger = Http(cluster), Http(cluster, ""), Http(cluster, "wrong")
    code, status = nobody("GET", JOBS)
    assert (code, status["reason"], status["details"]) == (403, "Forbidden", {"group": "batch", "kind": "jobs"})
    assert status["message"] == (
        'jobs.batch is forbidden: User "system:anonymous" cannot list resource "jobs" in API group "batch" in the namespace "default"'
    )
    assert stranger("GET", JOBS)[1]["message"] == "Unauthorized"
    assert http("POST", JOBS, SLEEPING)[0] == 201
    code, status = http("POST", JOBS, SLEEPING)
    assert (code, status["reason"], status["message"]) == (409, "AlreadyExists", 'jobs.batch "t" already exists')
    assert status["details"] == {"name": "t", "group": "batch", "kind": "jobs"}
    assert http("POST", f"{JOBS}?dryRun=All", SLEEPING)[0] == 409

    stale = http("GET", f"{JOBS}/t")[1]
    assert http("PATCH", f"{JOBS}/t", {"metadata": {"labels": {"a": "b"}}}, "merge-patch+json")[0] == 200
    code, status = http("PUT", f"{JOBS}/t", stale)
    assert (code, status["reason"]) == (409, "Conflict")
    assert status["message"] == (
        'Operation cannot be fulfilled on jobs.batch "t": the object has been modified; '
        "please apply your changes to the latest version and try again"
    )

    code, status = http("POST", JOBS, changed(SLEEPING, name="Bad_Name", completions=-1))
    assert (code, status["reason"]) == (422, "Invalid")
    assert status["message"].startswith('Job.batch "Bad_Name" is invalid: [metadata.name: Invalid value: "Bad_Name": ')
    assert {"reason": "FieldValueInvalid", "field": "spec.completions",
            "message": "Invalid value: -1: must be greater than or equal to 0"} in status["details"]["causes"]  # fmt: skip
    code, status = http("PATCH", f"{JOBS}/t", {"spec": {"completions": 3}}, "merge-patch+json")
    assert (code, status["message"]) == (
        422, 'Job.batch "t" is invalid: spec.completions: Invalid value: 3: field is immutable',
    )  # fmt: skip

    wrong = changed(SLEEPING, name="x")
    wrong["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": {"memory": "much"}}
    code, status = http("POST", JOBS, wrong)
    start = 'Job in version "v1" cannot be handled as a Job: quantities must match the regular expression'
    assert (code, status["reason"], status["message"][: len(start)]) == (400, "BadRequest", start)
    unknown = changed(SLEEPING, name="unknown", completionz=1)
    code, status = http("POST", f"{JOBS}?fieldValidation=Strict", unknown)
    assert (code, status["message"]) == (400, 'strict decoding error: unknown field "spec.completionz"')
    code, made = http("POST", JOBS, unknown)
    assert code == 201 and "completionz" not in made["spec"]
    code, status = http("POST", JOBS, changed(SLEEPING, name="x", parallelism="two"))
    assert (
        code == 400
        and "cannot unmarshal string into Go struct field Job.spec.parallelism of type int32" in status["message"]
    )

    code, status = http("POST", "/api/v1/namespaces/nowhere/configmaps", CONFIG)
    assert (code, status["message"]) == (404, 'namespaces "nowhere" not found')
    assert http("GET", f"{JOBS}/missing")[1]["message"] == 'jobs.batch "missing" not found'
    assert http("GET", "/apis/kubeflow.org/v1/pytorchjobs") == (404, "404 page not found\n")
    big = {**CONFIG, "metadata": {"name": "big"}, "data": {"a": "x" * 600_000, "b": "x" * 600_000}}
    code, status = http("POST", CONFIGS, big)
    assert (code, status["message"]) == (
        422,
        'ConfigMap "big" is invalid: []: Too long: must have at most 1048576 bytes',
    )
    code, status = http("POST", CONFIGS, {**CONFIG, "data": {"a": "x" * 3_200_000}})
    assert (code, status["reason"]) == (413, "RequestEntityTooLarge")
    assert status["message"] == "Request entity too large: limit is 3145728"


def test_a_dry_run_checks_and_stores_nothing(cluster: Cluster) -> None:
    http = Http(cluster)
    code, made = http("POST", f"{JOBS}?dryRun=All&fieldValidation=Strict", SLEEPING)
    assert code == 201 and made["metadata"]["uid"] and made["spec"]["template"]["spec"]["dnsPolicy"] == "ClusterFirst"
    assert http("GET", f"{JOBS}/t")[0] == 404
    assert http("POST", f"{JOBS}?dryRun=All", changed(SLEEPING, backoffLimit=-1))[0] == 422


def test_permissions(cluster: Cluster) -> None:
    rules = [{"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get", "list"]}]
    cluster.user("alice", rules=rules)
    http = Http(cluster, "alice")
    assert http("GET", JOBS)[0] == 200
    code, status = http("POST", JOBS, SLEEPING)
    assert code == 403 and status["message"].startswith(
        'jobs.batch is forbidden: User "alice" cannot create resource "jobs"'
    )

    def may(verb: str, group: str, resource: str) -> bool:
        attributes = {"namespace": "default", "verb": verb, "group": group, "resource": resource}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        code, answer = http("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
        assert code == 201
        return bool(answer["status"]["allowed"])

    assert may("list", "batch", "jobs") and not may("create", "batch", "jobs") and not may("list", "", "pods")
    cluster.deny("list", "jobs")
    assert not may("list", "batch", "jobs") and http("GET", JOBS)[0] == 403
    cluster.allow()
    assert http("GET", JOBS)[0] == 200


def test_lists_come_in_pages(cluster: Cluster) -> None:
    http = Http(cluster)
    for index in range(5):
        body = {**CONFIG, "metadata": {"name": f"c{index}", "labels": {"odd": str(index % 2)}}}
        assert http("POST", CONFIGS, body)[0] == 201
    _, first = http("GET", f"{CONFIGS}?limit=2")
    assert [one["metadata"]["name"] for one in first["items"]] == ["c0", "c1"]
    assert first["metadata"]["remainingItemCount"] == 4 and "kind" not in first["items"][0]  # kube-root-ca.crt is there
    _, second = http("GET", f"{CONFIGS}?limit=2&continue={first['metadata']['continue']}")
    assert [one["metadata"]["name"] for one in second["items"]] == ["c2", "c3"]
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    _, last = http("GET", f"{CONFIGS}?limit=2&continue={second['metadata']['continue']}")
    assert len(last["items"]) == 2 and "continue" not in last["metadata"]
    _, odd = http("GET", f"{CONFIGS}?labelSelector=odd%3D1")
    assert [one["metadata"]["name"] for one in odd["items"]] == ["c1", "c3"]
    code, status = http("GET", f"{CONFIGS}?limit=2&continue=damaged")
    assert code == 400 and status["message"].startswith("invalid continue token")
    cluster.expire_watches()
    code, status = http("GET", f"{CONFIGS}?limit=2&continue={first['metadata']['continue']}")
    assert (code, status["reason"]) == (410, "Expired")


def test_watches(cluster: Cluster) -> None:
    http = Http(cluster)
    http("POST", CONFIGS, CONFIG)
    version = http("GET", CONFIGS)[1]["metadata"]["resourceVersion"]
    cluster.server.bookmark_every = 0.05
    events = http.watch(f"{CONFIGS}?watch=true&resourceVersion={version}&allowWatchBookmarks=true&timeoutSeconds=30")
    kind, mark = next(events)
    assert kind == "BOOKMARK" and set(mark) == {"kind", "apiVersion", "metadata"}
    cluster.server.bookmark_every = 60
    http("PATCH", f"{CONFIGS}/c", {"data": {"a": "new"}}, "merge-patch+json")
    http("DELETE", f"{CONFIGS}/c")
    seen: list[Any] = []
    while len(seen) < 2:
        if (event := next(events))[0] != "BOOKMARK":
            seen.append(event)
    assert [kind for kind, _ in seen] == ["MODIFIED", "DELETED"] and seen[0][1]["data"] == {"a": "new"}

    # It ends by itself.
    assert list(http.watch(f"{CONFIGS}?watch=true&resourceVersion={version}&timeoutSeconds=1"))[-1][0] == "DELETED"
    threading.Timer(0.2, cluster.expire_watches).start()
    *_, (kind, status) = events
    assert (kind, status["code"], status["reason"]) == ("ERROR", 410, "Expired")
    ((kind, status),) = http.watch(f"{CONFIGS}?watch=true&resourceVersion=1")
    assert kind == "ERROR" and status["message"].startswith("too old resource version: 1 (")


def test_patches(cluster: Cluster) -> None:
    http = Http(cluster)
    http("POST", JOBS, SLEEPING)
    path = f"{JOBS}/t"
    assert (
        http("PATCH", path, {"spec": {"backoffLimit": 3}}, "strategic-merge-patch+json")[1]["spec"]["backoffLimit"] == 3
    )
    operations = [
        {"op": "replace", "path": "/spec/backoffLimit", "value": 4},
        {"op": "add", "path": "/metadata/labels/x~1y", "value": "z"},
    ]
    _, job_ = http("PATCH", path, operations, "json-patch+json")
    assert job_["spec"]["backoffLimit"] == 4 and job_["metadata"]["labels"]["x/y"] == "z"
    assert http("PATCH", path, [{"op": "test", "path": "/spec/backoffLimit", "value": 5}], "json-patch+json")[0] == 422
    # The status has a path of its own, and is not changed by any other.
    assert "succeeded" not in http("PATCH", path, {"status": {"succeeded": 9}}, "merge-patch+json")[1]["status"]
    cluster.conflict()
    assert http("PATCH", path, {"spec": {"backoffLimit": 5}}, "merge-patch+json")[0] == 409
    assert http("PATCH", path, {"spec": {"backoffLimit": 5}}, "merge-patch+json")[0] == 200


def test_throttling_and_restarts(cluster: Cluster) -> None:
    http = Http(cluster)
    cluster.throttle(2)
    for _ in range(2):
        code, status = http("GET", JOBS)
        assert (code, status["reason"], http.headers["Retry-After"]) == (429, "TooManyRequests", "1")
    http("POST", JOBS, SLEEPING)
    events = http.watch(f"{JOBS}?watch=true")
    assert next(events)[0] == "ADDED"
    cluster.stop_server()
    with contextlib.suppress(OSError, http_client.HTTPException):
        list(events)
    with pytest.raises(OSError):
        http("GET", JOBS)
    cluster.start_server()
    assert [one["metadata"]["name"] for one in http("GET", JOBS)[1]["items"]] == ["t"]
    cluster.restart_at("DELETE", "/jobs/t", after=True)
    with pytest.raises(OSError):
        http("DELETE", f"{JOBS}/t")
    cluster.wait_for_server()
    assert http("GET", f"{JOBS}/t")[0] == 404  # it was carried out
    cluster.restart_at("GET", "/jobs")
    with pytest.raises(OSError):
        http("GET", JOBS)
    cluster.wait_for_server()
    assert http("GET", JOBS)[0] == 200


def test_what_belongs_to_nobody_goes(cluster: Cluster) -> None:
    http = Http(cluster)
    _, owner = http("POST", JOBS, SLEEPING)
    reference = {"apiVersion": "batch/v1", "kind": "Job", "name": "t", "uid": owner["metadata"]["uid"]}
    owned = {**CONFIG, "metadata": {"name": "owned", "ownerReferences": [reference]}}
    http("POST", CONFIGS, owned)
    http("DELETE", f"{JOBS}/t", {"propagationPolicy": "Background"})
    store = cluster.storage
    cluster.wait(lambda: store.get(cluster.resource("ConfigMap"), "default", "owned") is None, "it is collected")
    # Its owner has gone before: it goes too.
    http("POST", CONFIGS, owned)
    cluster.wait(lambda: store.get(cluster.resource("ConfigMap"), "default", "owned") is None, "it is collected")
    _, owner = http("POST", JOBS, SLEEPING)
    owned["metadata"]["ownerReferences"][0]["uid"] = owner["metadata"]["uid"]
    http("POST", CONFIGS, owned)
    http("DELETE", f"{JOBS}/t")  # a Job leaves its own behind unless it is said otherwise
    cluster.wait(lambda: store.get(cluster.resource("Job"), "default", "t") is None, "the job is gone")
    assert "ownerReferences" not in http("GET", f"{CONFIGS}/owned")[1]["metadata"]


def test_quotas(cluster: Cluster) -> None:
    cluster.quota(pods="1")
    cluster.create(job("sleep 1000", completions=2))
    words = 'Error creating: pods "t-1-'
    event = cluster.wait(
        lambda: next(
            (e for e in cluster.storage.all(cluster.resource("Event")) if e["reason"] == "FailedCreate"), None
        ),
        "it is refused",
    )
    assert (
        event["message"].startswith(words) and event["involvedObject"]["kind"] == "Job" and event["type"] == "Warning"
    )
    assert event["message"].endswith(
        "is forbidden: exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1"
    )
    assert len(cluster.all("Pod")) == 1
    cluster.wait(
        lambda: cluster.storage.get(cluster.resource("Job"), "default", "t")["status"].get("active") == 1,
        "one is active",
    )
    assert cluster.get("ResourceQuota", "q")["status"] == {"hard": {"pods": "1"}, "used": {"pods": "1"}}


@pytest.mark.parametrize("minor", [24, 31])
def test_versions(make_cluster: Callable[..., Cluster], minor: int) -> None:
    cluster = make_cluster(minor=minor, operators=["training-operator"])
    http = Http(cluster)
    assert http("GET", "/version")[1]["gitVersion"] == f"v1.{minor}.0"
    groups = {group["name"] for group in http("GET", "/apis")[1]["groups"]}
    assert {"batch", "kubeflow.org", "authorization.k8s.io"} <= groups
    kinds = {one["kind"] for one in http("GET", "/apis/kubeflow.org/v1")[1]["resources"]}
    assert {"PyTorchJob", "MPIJob"} <= kinds
    newer = changed(SLEEPING, podReplacementPolicy="Failed")
    code, status = http("POST", f"{JOBS}?fieldValidation=Strict", newer)
    assert (code, status.get("message")) == (
        (201, None) if minor == 31 else (400, 'strict decoding error: unknown field "spec.podReplacementPolicy"')
    )


def test_many_objects(cluster: Cluster) -> None:
    http = Http(cluster)
    cluster.fill(SLEEPING, jobs=1000, pods=10)
    count, pages, token = 0, 0, ""
    while True:
        _, page = http("GET", f"{PODS}?limit=500&continue={token}")
        count, pages, token = count + len(page["items"]), pages + 1, page["metadata"].get("continue", "")
        if not token:
            break
    assert (count, pages) == (10_000, 20)
