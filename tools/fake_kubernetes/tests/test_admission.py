"""What a namespace admits, and how the server, the Job controller and the scheduler say it: as in Kubernetes' source."""

from __future__ import annotations

import urllib.parse
from typing import TYPE_CHECKING, Any

import pytest

from fake_kubernetes.client import Http

from .support import job

if TYPE_CHECKING:
    from collections.abc import Callable

    from fake_kubernetes.cluster import Cluster

JOBS, PODS = "/apis/batch/v1/namespaces/default/jobs", "/api/v1/namespaces/default/pods"
EVENTS = "/api/v1/namespaces/default/events"
HARDENED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def every(cluster: Cluster, kind: str) -> list[dict[str, Any]]:
    """All objects of a kind, for conditions of `wait`, which run in the loop's thread."""
    return list(cluster.storage.all(cluster.resource(kind)))


def label(cluster: Cluster, **modes: str) -> None:
    labels = {f"pod-security.kubernetes.io/{mode}": level for mode, level in modes.items()}
    cluster.patch("Namespace", "default", {"metadata": {"labels": labels}}, "")


def why(cluster: Cluster, name: str = "t") -> str:
    """Why a Job gets no pod."""

    def refused() -> str:
        found = (it for it in every(cluster, "Event") if it["reason"] == "FailedCreate")
        return next((it["message"] for it in found if it["involvedObject"]["name"] == name), "")

    return cluster.wait(refused, "it is refused").partition(" is forbidden: ")[2]


def test_warnings_of_pod_security(cluster: Cluster) -> None:
    http = Http(cluster)
    label(cluster, warn="restricted", enforce="baseline")
    bare = job("true", suspend=True)
    assert http("POST", f"{JOBS}?dryRun=All", bare)[0] == 201
    assert http.headers["Warning"] == (
        r'299 - "would violate PodSecurity \"restricted:latest\": allowPrivilegeEscalation != false (container '
        r"\"main\" must set securityContext.allowPrivilegeEscalation=false), unrestricted capabilities (container "
        r"\"main\" must set securityContext.capabilities.drop=[\"ALL\"]), runAsNonRoot != true (pod or container "
        r"\"main\" must set securityContext.runAsNonRoot=true), seccompProfile (pod or container \"main\" must set "
        r'securityContext.seccompProfile.type to \"RuntimeDefault\" or \"Localhost\")"'
    )
    safe = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    hardened = job("true", suspend=True, container={"securityContext": HARDENED}, pod={"securityContext": safe})
    assert http("POST", f"{JOBS}?dryRun=All", hardened)[0] == 201 and "Warning" not in http.headers
    label(cluster, warn="privileged", enforce="restricted")
    assert http("POST", f"{JOBS}?dryRun=All", bare)[0] == 201 and "Warning" not in http.headers
    cluster.patch("Namespace", "default", {"metadata": {"labels": {"pod-security.kubernetes.io/warn": None}}}, "")
    assert http("POST", f"{JOBS}?dryRun=All", bare)[0] == 201 and "restricted:latest" in http.headers["Warning"]
    label(cluster, enforce="baseline")
    paths = [{"name": "data", "hostPath": {"path": "/data"}}]
    cluster.create(job("true", volumes=paths, pod={"hostNetwork": True}))
    assert why(cluster) == (
        'violates PodSecurity "baseline:latest": host namespaces (hostNetwork=true), hostPath volumes (volume "data")'
    )


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, "failed quota: q: must specify cpu for: main; limits.memory for: main"),
        ({"limits": {"cpu": "9", "memory": "1Gi"}}, "maximum cpu usage per Container is 4, but limit is 9"),
        ({"requests": {"cpu": "10m"}}, "minimum cpu usage per Container is 100m, but request is 10m"),
    ],
)
def test_what_containers_have_to_ask_for(cluster: Cluster, asked: dict[str, Any], expected: str) -> None:
    cluster.quota(cpu="100", **{"limits.memory": "100Gi"})
    if asked:
        rule = {"type": "Container", "min": {"cpu": "100m"}, "max": {"cpu": "4"}, "default": {"memory": "2Gi"}}
        limits = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "r"}, "spec": {"limits": [rule]}}
        cluster.create(limits)
        cluster.create(job("sleep 1000", name="usual"))
        (pod,) = cluster.wait(lambda: every(cluster, "Pod"), "it has a pod")
        both = {"cpu": "4", "memory": "2Gi"}
        assert pod["spec"]["containers"][0]["resources"] == {"limits": both, "requests": both}
    cluster.create(job("sleep 1000", container={"resources": asked}))
    assert why(cluster) == expected


def test_fields_that_a_selector_may_name(cluster: Cluster) -> None:
    http = Http(cluster)
    cluster.create(job("true", suspend=True))
    assert len(http("GET", f"{JOBS}?fieldSelector=metadata.name%3Dt")[1]["items"]) == 1
    code, status = http("GET", f"{JOBS}?fieldSelector=spec.suspend%3Dtrue")
    assert (code, status["message"]) == (400, "field label not supported: spec.suspend")


def test_long_names_are_cut(cluster: Cluster) -> None:
    name = "a" * 61
    cluster.create(job("sleep 1000", name=name))
    (pod,) = cluster.wait(lambda: every(cluster, "Pod"), "it has a pod")
    assert pod["metadata"]["generateName"] == f"{'a' * 55}-0-" and len(pod["metadata"]["name"]) == 63
    assert pod["spec"]["hostname"] == f"{name}-0"


def test_events(cluster: Cluster) -> None:
    """The scheduler's have other times; of many alike the last ones are combined."""
    cluster.create(job("true", name="big", container={"resources": {"limits": {"nvidia.com/gpu": "99"}}}))
    query = urllib.parse.quote("reason=FailedScheduling,type=Warning")
    cluster.wait(lambda: any(it["reason"] == "FailedScheduling" for it in every(cluster, "Event")), "it waits")
    (event,) = Http(cluster)("GET", f"{EVENTS}?fieldSelector={query}")[1]["items"]
    assert event["firstTimestamp"] is event["lastTimestamp"] is None and "count" not in event
    assert event["eventTime"].endswith("Z") and event["reportingComponent"] == "default-scheduler"
    cluster.quota(pods="1")
    cluster.create(job("true", completions=20, parallelism=20))

    def combined() -> list[dict[str, Any]]:
        found = [it for it in every(cluster, "Event") if it["reason"] == "FailedCreate"]
        return found if any(it["message"].startswith("(combined") for it in found) else []

    found = cluster.wait(combined, "many are refused")
    assert len(found) == 11
    assert found[-1]["message"].startswith('(combined from similar events): Error creating: pods "t-')


def test_a_job_fails_when_its_pods_have_ended(new_cluster: Cluster) -> None:
    """From 1.31 on; until then it says that it will."""
    rules = [{"action": "FailJob", "onExitCodes": {"containerName": "main", "operator": "In", "values": [7]}}]
    script = "trap '' TERM; [ $JOB_COMPLETION_INDEX = 0 ] && exit 7; while :; do sleep 0.1; done"
    pod = {"terminationGracePeriodSeconds": 3}
    new_cluster.create(job(script, completions=2, pod=pod, podFailurePolicy={"rules": rules}))

    def conditions() -> list[dict[str, Any]]:
        (job,) = every(new_cluster, "Job")
        return job["status"].get("conditions") or []

    (target,) = new_cluster.wait(conditions, "it is about to fail")
    assert (target["type"], target["reason"]) == ("FailureTarget", "PodFailurePolicy")
    name = next(it["metadata"]["name"] for it in new_cluster.all("Pod") if it["metadata"]["name"].startswith("t-0-"))
    words = f"Container main for pod default/{name} failed with exit code 7 matching FailJob rule at index 0"
    assert target["message"] == words
    new_cluster.wait(lambda: new_cluster.ended("t") == "Failed", "it has failed")
    assert [(it["type"], it["message"]) for it in conditions()] == [("FailureTarget", words), ("Failed", words)]
    assert all(it["status"]["phase"] in ("Failed", "Succeeded") for it in new_cluster.all("Pod"))


def test_rules_of_a_failure_policy(new_cluster: Cluster) -> None:
    rule = {"action": "FailJob", "onExitCodes": {"containerName": "other", "operator": "In", "values": [3, 0]}}
    wrong = job("true", podFailurePolicy={"rules": [rule, {"action": "Ignore"}]}, podReplacementPolicy="Failed")
    code, status = Http(new_cluster)("POST", JOBS, wrong)
    fields = [cause["field"].removeprefix("spec.podFailurePolicy.rules") for cause in status["details"]["causes"]]
    assert code == 422
    assert fields == ["[0].onExitCodes.containerName", "[0].onExitCodes.values", "[0].onExitCodes.values[1]", "[1]"]


def test_pods_are_spread_over_zones(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(nodes=3)
    for number, zone in enumerate(("a", "a", "b"), 1):
        cluster.patch("Node", f"node-{number}", {"metadata": {"labels": {"zone": zone}}}, "")

    def spread(name: str, when: str, count: int) -> dict[str, Any]:
        rule = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": when}
        rule["labelSelector"] = {"matchLabels": {"job-name": name}}
        return job("sleep 1000", name=name, completions=count, pod={"topologySpreadConstraints": [rule]})

    def zones(name: str, count: int) -> list[str]:
        pods = [it for it in every(cluster, "Pod") if it["metadata"]["labels"]["job-name"] == name]
        nodes = [it["spec"]["nodeName"] for it in pods if it["spec"].get("nodeName")]
        return sorted("b" if node == "node-3" else "a" for node in nodes) if len(nodes) == count else []

    cluster.create(spread("soft", "ScheduleAnyway", 4))
    assert cluster.wait(lambda: zones("soft", 4), "they have nodes") == ["a", "a", "b", "b"]
    cluster.cordon("node-3")
    cluster.create(spread("hard", "DoNotSchedule", 3))
    assert cluster.wait(lambda: zones("hard", 1), "one has a node") == ["a"]
    waits = cluster.wait(
        lambda: [it for it in every(cluster, "Event") if it["involvedObject"]["name"].startswith("hard-1-")], "it waits"
    )
    assert "2 node(s) didn't match pod topology spread constraints" in waits[-1]["message"]


def test_a_folder_that_grows_too_big(new_cluster: Cluster) -> None:
    volumes = [{"name": "work", "emptyDir": {"sizeLimit": "1Mi"}}]
    script = "dd if=/dev/zero of=/work/big bs=1M count=3 2>&-; sleep 1000"
    new_cluster.create(job(script, volumes=volumes, mounts={"work": "/work"}))
    new_cluster.wait(lambda: new_cluster.ended("t") == "Failed", "it is evicted")
    status = new_cluster.all("Pod")[0]["status"]
    said = 'Usage of EmptyDir volume "work" exceeds the limit "1Mi". '
    assert (status["reason"], status["message"]) == ("Evicted", said)


def test_a_pod_that_may_not_be_root(cluster: Cluster) -> None:
    cluster.create(job("true", pod={"securityContext": {"runAsNonRoot": True}}))

    def waiting() -> dict[str, Any]:
        entries = [it for pod in every(cluster, "Pod") for it in pod["status"].get("containerStatuses") or []]
        found: dict[str, Any] = next((it["state"]["waiting"] for it in entries if "waiting" in it["state"]), {})
        return found if found.get("message") else {}

    found = cluster.wait(waiting, "it waits")
    assert found["reason"] == "CreateContainerConfigError"
    assert found["message"].startswith("container has runAsNonRoot and image will run as root (pod: ")
    code, status = Http(cluster)(
        "POST", JOBS, job("true", name="x", pod={"securityContext": {"seccompProfile": {"type": "No"}}})
    )
    supported = 'supported values: "Localhost", "RuntimeDefault", "Unconfined"'
    assert code == 422 and f'Unsupported value: "No": {supported}' in status["message"]
