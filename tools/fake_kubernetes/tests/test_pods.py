"""Pods of the lab: what they see, how they end, and why they do not run."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest

from fake_kubernetes.client import Http

from .support import CONFIG, eventually, job, service

if TYPE_CHECKING:
    from collections.abc import Callable

    from fake_kubernetes.cluster import Cluster

LOG = "/api/v1/namespaces/default/pods/{}/log"


def pods(cluster: Cluster) -> list[dict[str, Any]]:
    """The pods, sorted by name; call it in the loop's thread or let `wait` do so."""
    return sorted(cluster.storage.all(cluster.resource("Pod")), key=lambda pod: pod["metadata"]["name"])


def pod(cluster: Cluster, condition: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
    """The first pod of which something becomes true."""
    return cluster.wait(lambda: next((one for one in pods(cluster) if condition(one)), None), what)  # type: ignore[return-value]


def runs(one: dict[str, Any]) -> bool:
    return one["status"].get("phase") == "Running" and not one["metadata"].get("deletionTimestamp")


def state(one: dict[str, Any], kind: str) -> dict[str, Any]:
    found = one["status"].get("containerStatuses") or [{"state": {}}]
    return found[0]["state"].get(kind) or {}


def job_status(cluster: Cluster, name: str = "t") -> dict[str, Any]:
    return cluster.storage.get(cluster.resource("Job"), "default", name).get("status") or {}  # type: ignore[union-attr]


def log(cluster: Cluster, name: str, query: str = "") -> str:
    code, text = Http(cluster)("GET", LOG.format(name) + query)
    assert code == 200, text
    return text  # type: ignore[no-any-return]


def test_what_a_pod_sees(cluster: Cluster) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"token": "secret"}}
    for one in ({**CONFIG, "data": {"a": "hello"}}, secret, service()):
        cluster.create(one)
    data = cluster.claim("training-data")
    (data / "digits").write_text("123")
    env = [
        {"name": "PLAIN", "value": "a"}, {"name": "AGAIN", "value": "$(PLAIN)$(NOPE)$$(PLAIN)"},
        {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}},
        {"name": "CONFIG", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "a"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
    ]  # fmt: skip
    volumes = [
        {"name": "s", "secret": {"secretName": "s", "defaultMode": 0o400}}, {"name": "e", "emptyDir": {}},
        {"name": "m", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        {"name": "d", "persistentVolumeClaim": {"claimName": "training-data"}},
        {"name": "p", "projected": {"sources": [
            {"configMap": {"name": "c", "items": [{"key": "a", "path": "below/a"}]}},
            {"downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}},
        ]}},
    ]  # fmt: skip
    mounts = {"s": "/secret", "e": "/empty", "m": "/dev/shm", "d": "/mnist_data", "p": "/projected"}
    script = """
        echo "$AGAIN|$SECRET|$CONFIG|$NODE|$IP|$CPUS|$FROM_a"; pwd; cat /started/by
        stat -Lc %a /secret/token; cat /mnist_data/digits; echo more > /mnist_data/more; cat /projected/below/a /projected/name; echo
        findmnt -no FSTYPE,SIZE /dev/shm; touch /empty/x && ls /empty; echo $$$$ $(hostname); cat /etc/hosts
        ls /var/run/secrets/kubernetes.io/serviceaccount; printf "a message" > /dev/termination-log; touch /made-here; exit 3
    """
    init = {"name": "first", "image": "any", "command": ["sh", "-c", "echo init > /started/by; echo log of init"],
            "volumeMounts": [{"name": "e", "mountPath": "/started"}]}  # fmt: skip
    one = job(script, volumes=volumes, mounts=mounts, pod={"initContainers": [init]}, container={
        "env": env, "envFrom": [{"prefix": "FROM_", "configMapRef": {"name": "c"}}], "workingDir": "/new/folder",
        "resources": {"limits": {"cpu": "2", "memory": "1Gi"}},
    })  # fmt: skip
    one["spec"]["template"]["spec"]["containers"][0]["volumeMounts"].append({"name": "e", "mountPath": "/started"})
    cluster.create(one)
    ended = pod(cluster, lambda one: one["status"]["phase"] == "Failed", "the pod ends")
    name = ended["metadata"]["name"]
    lines = log(cluster, name, "?container=main").splitlines()
    node, address = ended["spec"]["nodeName"], ended["status"]["podIP"]
    assert lines[0] == f"a$(NOPE)$(PLAIN)|secret|hello|{node}|{address}|2|hello"
    assert lines[1:5] == ["/new/folder", "init", "400", f"123hello{name}"] and lines[5].split() == ["tmpfs", "1G"]
    assert lines[6:8] == ["by", "x"] and lines[8] == "1 t-0"
    assert f"{ended['status']['podIP']}\tt-0.t.default.svc.cluster.local t-0" in lines
    assert lines[-3:] == ["ca.crt", "namespace", "token"]
    assert log(cluster, name, "?container=first") == "log of init\n"
    assert (data / "more").read_text() == "more\n"
    ending = state(ended, "terminated")
    assert (ending["exitCode"], ending["reason"], ending["message"]) == (3, "Error", "a message")
    status = cluster.wait(lambda: cluster.ended("t") and job_status(cluster), "the job fails")
    (condition,) = status["conditions"]
    assert (condition["type"], condition["reason"]) == ("Failed", "BackoffLimitExceeded")
    assert condition["message"] == "Job has reached the specified backoff limit"
    assert ended["status"]["qosClass"] == "Guaranteed"
    # Nothing of it is on the machine.
    assert not any(os.path.exists(path) for path in ("/made-here", "/new", "/projected", "/mnist_data"))


@pytest.mark.parametrize(
    ("image", "command", "expected"),
    [
        ("no-python", "command -v python || command -v python3 || echo none", "none\n"),
        ("python:3.8", "python3 -c 'import sys; print(sys.version_info[:2])'", "(3, 8)\n"),
        ("no-torch", "python -c 'import numpy, importlib.util; print(importlib.util.find_spec(\"torch\"))'", "None\n"),
    ],
)
def test_images(cluster: Cluster, image: str, command: str, expected: str) -> None:
    cluster.create(job(command, container={"image": image}))
    cluster.wait(lambda: cluster.ended("t"), "it ends")
    assert log(cluster, cluster.all("Pod")[0]["metadata"]["name"]) == expected


def test_who_runs_a_pod(cluster: Cluster) -> None:
    """Not root, and nothing can be written but in volumes."""
    script = "id -u; id -g; ls -A /config | sort; cat /config/a; touch /x || echo no; touch /data/x && printf done > /dev/termination-log"
    cluster.create(CONFIG)
    volumes = [{"name": "c", "configMap": {"name": "c"}}, {"name": "d", "emptyDir": {}}]
    fixed = {"image": "non-root", "securityContext": {"readOnlyRootFilesystem": True}}
    cluster.create(job(script, volumes=volumes, mounts={"c": "/config", "d": "/data"}, container=fixed))
    assert cluster.wait(lambda: cluster.ended("t"), "it ends") == "Complete"
    (one,) = cluster.all("Pod")
    lines = log(cluster, one["metadata"]["name"]).splitlines()
    assert lines[:2] == ["1000", "0"] and lines[2].startswith("..20") and lines[3:6] == ["..data", "a", "hello"]
    assert lines[-1] == "no" and state(one, "terminated")["message"] == "done"


def reason(one: dict[str, Any]) -> str:
    return str(state(one, "waiting").get("reason", ""))


def test_why_a_pod_does_not_run(cluster: Cluster) -> None:
    cases: dict[str, dict[str, Any]] = {
        "gpus": {"container": {"resources": {"limits": {"nvidia.com/gpu": "9"}}}},
        "selector": {"pod": {"nodeSelector": {"disk": "fast"}}},
        "claim": {"volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "nope"}}]},
        "name": {"container": {"image": "Upper:1"}},
        "pull": {"container": {"image": "missing"}},
        "secret": {"container": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "nope", "key": "k"}}}]}},
        "config": {"volumes": [{"name": "c", "configMap": {"name": "nope"}}], "mounts": {"c": "/c"}},
        "program": {"container": {"command": ["/no/such/program"]}},
        "init": {"pod": {"initContainers": [{"name": "first", "image": "any", "command": ["sh", "-c", "exit 4"]}]}},
    }  # fmt: skip
    for name, options in cases.items():
        cluster.create(job("sleep 1000", name, **options))

    def of(name: str) -> Callable[[dict[str, Any]], bool]:
        return lambda one: one["metadata"]["name"].startswith(f"{name}-0-")

    def unscheduled(name: str) -> str:
        def message(one: dict[str, Any]) -> str:
            found = [
                c
                for c in one["status"].get("conditions") or []
                if c["type"] == "PodScheduled" and c["status"] == "False"
            ]
            return found[0]["message"] if of(name)(one) and found and found[0]["reason"] == "Unschedulable" else ""

        return message(pod(cluster, message, f"{name} cannot be scheduled"))

    assert unscheduled("gpus").startswith(
        "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: 0/2 nodes"
    )
    assert "2 node(s) didn't match Pod's node affinity/selector" in unscheduled("selector")
    assert 'persistentvolumeclaim "nope" not found' in unscheduled("claim")
    for word in ("ErrImagePull", "ImagePullBackOff", "ErrImagePull"):
        pulled = pod(cluster, lambda one, word=word: of("pull")(one) and reason(one) == word, word)
        if word == "ImagePullBackOff":
            assert state(pulled, "waiting")["message"] == 'Back-off pulling image "missing"'
    waits = pod(cluster, lambda one: of("name")(one) and reason(one) == "InvalidImageName", "it has no image")
    assert "couldn't parse image reference" in state(waits, "waiting")["message"]
    waits = pod(
        cluster, lambda one: of("secret")(one) and reason(one) == "CreateContainerConfigError", "it lacks a secret"
    )
    assert state(waits, "waiting")["message"] == 'secret "nope" not found'
    waits = pod(cluster, lambda one: of("config")(one) and reason(one) == "ContainerCreating", "it lacks a volume")
    assert "message" not in state(waits, "waiting")
    ended = state(
        pod(cluster, lambda one: of("program")(one) and state(one, "terminated"), "it cannot start"), "terminated"
    )
    assert (ended["exitCode"], ended["reason"]) == (128, "StartError")
    assert 'exec: "/no/such/program": stat /no/such/program: no such file or directory' in ended["message"]
    failed = pod(
        cluster, lambda one: of("init")(one) and one["status"]["phase"] == "Failed", "its first container fails"
    )
    assert failed["status"]["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 4
    assert reason(failed) == "PodInitializing"

    def event(kind: str, words: str) -> Callable[[], object]:
        return lambda: any(
            words in one["message"] and one["reason"] == kind for one in cluster.storage.all(cluster.resource("Event"))
        )

    cluster.wait(
        event("FailedMount", 'MountVolume.SetUp failed for volume "c" : configmap "nope" not found'), "an event says so"
    )
    cluster.wait(event("Failed", "no such host"), "an event says why")
    code, status = Http(cluster)("GET", LOG.format(pod(cluster, of("config"), "")["metadata"]["name"]))
    assert code == 400 and status["message"].endswith("is waiting to start: ContainerCreating")
    # What is missing comes, and they go on.
    cluster.create({**CONFIG, "metadata": {"name": "nope"}})
    cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "nope"}, "stringData": {"k": "v"}})
    for name in ("config", "secret"):
        pod(cluster, lambda one, name=name: of(name)(one) and runs(one), f"{name} runs")


def test_how_pods_end(cluster: Cluster) -> None:
    """Out of memory, evicted, deleted with their grace."""
    cluster.create(
        job("trap 'echo got it; exit 0' TERM; echo ready; while :; do sleep 0.05; done", "kind", backoffLimit=9)
    )
    cluster.create(job("while :; do sleep 0.05; done", "oom"))
    cluster.create(job("while :; do sleep 0.05; done", "evicted"))
    named = {}
    for name in ("kind", "oom", "evicted"):
        one = pod(
            cluster, lambda one, name=name: one["metadata"]["name"].startswith(name) and runs(one), f"{name} runs"
        )
        named[name] = one["metadata"]["name"]
    cluster.oom(named["oom"])
    cluster.evict(named["evicted"])
    ended = pod(
        cluster, lambda one: one["metadata"]["name"] == named["oom"] and state(one, "terminated"), "it is killed"
    )
    assert (state(ended, "terminated")["exitCode"], state(ended, "terminated")["reason"]) == (137, "OOMKilled")
    ended = pod(
        cluster,
        lambda one: one["metadata"]["name"] == named["evicted"] and one["status"]["phase"] == "Failed",
        "it is evicted",
    )
    assert ended["status"]["reason"] == "Evicted" and "low on resource: memory" in ended["status"]["message"]
    assert "containerStatuses" not in ended["status"]

    eventually_ready = log(cluster, named["kind"], "?follow=true&limitBytes=6")
    assert eventually_ready == "ready\n"
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": named["kind"]}}
    assert Http(cluster)("POST", f"/api/v1/namespaces/default/pods/{named['kind']}/eviction", body)[0] == 201
    # The replacement does not wait for the old one; the job has not failed.
    pod(
        cluster,
        lambda one: one["metadata"]["name"].startswith("kind") and one["metadata"]["name"] != named["kind"],
        "a new one is there",
    )
    cluster.wait(
        lambda: not any(one["metadata"]["name"] == named["kind"] for one in pods(cluster)), "the old one is gone"
    )
    assert "failed" not in job_status(cluster, "kind")


@pytest.mark.parametrize("minor", [24, 31])
def test_a_lost_pod_and_the_ways_to_count(make_cluster: Callable[..., Cluster], minor: int) -> None:
    """With finalizers a deleted pod has failed once it has ended; without it never was there."""
    cluster = make_cluster(minor=minor)
    cluster.create(job("sleep 1000", pod={"terminationGracePeriodSeconds": 0}))
    first = pod(cluster, runs, "it runs")
    assert bool(first["metadata"].get("finalizers")) == (minor == 31)
    cluster.delete("Pod", first["metadata"]["name"])
    if minor == 31:
        cluster.wait(lambda: cluster.ended("t") == "Failed", "the job fails")
        assert job_status(cluster)["failed"] == 2  # with its replacement, which is deleted then
        assert "FailureTarget" in [one["type"] for one in job_status(cluster)["conditions"]]
    else:
        pod(cluster, lambda one: runs(one) and one["metadata"]["uid"] != first["metadata"]["uid"], "it is replaced")
        assert "failed" not in job_status(cluster)
    cluster.delete("Job", "t", propagationPolicy="Foreground")
    cluster.wait(
        lambda: not pods(cluster) and not cluster.storage.get(cluster.resource("Job"), "default", "t"), "all is gone"
    )


def test_suspend_resume_deadline_and_ttl(cluster: Cluster) -> None:
    cluster.create(
        job("sleep 1000", completions=2, ttlSecondsAfterFinished=0, pod={"terminationGracePeriodSeconds": 0})
    )
    http, path = Http(cluster), "/apis/batch/v1/namespaces/default/jobs/t"
    cluster.wait(lambda: job_status(cluster).get("ready") == 2, "both are ready")
    http("PATCH", path, {"spec": {"suspend": True}}, "merge-patch+json")
    cluster.wait(lambda: not pods(cluster), "no pod is left")
    (condition,) = job_status(cluster)["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("Suspended", "True", "JobSuspended")
    http("PATCH", path, {"spec": {"suspend": False}}, "merge-patch+json")
    cluster.wait(lambda: job_status(cluster).get("ready") == 2, "both are back")
    (condition,) = job_status(cluster)["conditions"]
    assert (condition["status"], condition["reason"]) == ("False", "JobResumed")
    http("PATCH", path, {"spec": {"activeDeadlineSeconds": 1}}, "merge-patch+json")
    cluster.wait(
        lambda: not cluster.storage.get(cluster.resource("Job"), "default", "t") and not pods(cluster),
        "it ends, and goes",
    )
    reasons = {one["reason"]: one["message"] for one in cluster.all("Event")}
    assert reasons["DeadlineExceeded"] == "Job was active longer than specified deadline"


def test_a_node_is_lost_and_comes_back(cluster: Cluster) -> None:
    cluster.create(service())
    script = "while :; do python3 -c \"import socket; socket.create_connection(('t-1.t', 9), 1)\" 2>&1 | tail -1; sleep 0.2; done"
    spread = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"job-name": "t"}}}]}}  # fmt: skip
    cluster.create(job(script, completions=2, pod={"affinity": spread, "terminationGracePeriodSeconds": 1}))
    cluster.wait(lambda: job_status(cluster).get("ready") == 2, "both are ready")
    here, there = pods(cluster)
    assert here["spec"]["nodeName"] != there["spec"]["nodeName"]
    node, name = there["spec"]["nodeName"], there["metadata"]["name"]
    stream = Http(cluster).open("GET", LOG.format(here["metadata"]["name"]) + "?follow=true")
    assert any(b"refused" in line for line in stream), "they reach each other"
    cluster.lose(node)
    assert any(b"refused" not in line for line in stream), "they do not"
    code, status = Http(cluster)("GET", LOG.format(name))
    assert code == 500 and "no route to host" in status["message"]
    lost = cluster.get("Node", node)
    assert [one["status"] for one in lost["status"]["conditions"] if one["type"] == "Ready"] == ["Unknown"]
    cluster.expire(node)
    # It stays, and its replacement finds no other node.
    assert cluster.get("Pod", name)["metadata"]["deletionTimestamp"]
    waiting = pod(
        cluster, lambda one: not one["spec"].get("nodeName") and one["status"].get("conditions"), "a replacement waits"
    )
    assert "untolerated taint {node.kubernetes.io/unreachable: }" in waiting["status"]["conditions"][0]["message"]
    cluster.back(node)
    cluster.wait(lambda: not any(one["metadata"]["name"] == name for one in pods(cluster)), "the old pod goes")
    cluster.wait(lambda: job_status(cluster).get("ready") == 2, "both are ready again")
    assert any(b"refused" in line for line in stream), "they reach each other again"


def test_a_pod_asks_the_server(cluster: Cluster) -> None:
    """By its service account, which may nothing until a Role says so."""
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "r"}, "rules": rules}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": "r"},
        "subjects": [{"kind": "ServiceAccount", "name": "default"}], "roleRef": {"kind": "Role", "name": "r", "apiGroup": "x"},
    }  # fmt: skip
    cluster.create(role)
    cluster.create(binding)
    script = """
        cd /var/run/secrets/kubernetes.io/serviceaccount
        python3 - <<END
import os, ssl, urllib.error, urllib.request
url = "https://" + os.environ["KUBERNETES_SERVICE_HOST"] + ":" + os.environ["KUBERNETES_SERVICE_PORT"]
for kind in ("pods", "secrets"):
    request = urllib.request.Request(url + "/api/v1/namespaces/" + open("namespace").read() + "/" + kind)
    request.add_header("Authorization", "Bearer " + open("token").read())
    try:
        print(urllib.request.urlopen(request, context=ssl.create_default_context(cafile="ca.crt")).status)
    except urllib.error.HTTPError as error:
        print(error.code)
END
    """
    cluster.create(job(script))
    cluster.wait(lambda: cluster.ended("t"), "it ends")
    assert log(cluster, cluster.all("Pod")[0]["metadata"]["name"]) == "200\n403\n"


@pytest.mark.parametrize("minor", [24, 31])
def test_fewer_and_more_pods(make_cluster: Callable[..., Cluster], minor: int) -> None:
    cluster = make_cluster(minor=minor)
    cluster.create(job("sleep 1000", completions=3, pod={"terminationGracePeriodSeconds": 0}, backoffLimit=10))
    cluster.wait(lambda: job_status(cluster).get("ready") == 3, "all are ready")
    path = "/apis/batch/v1/namespaces/default/jobs/t"
    both = {"spec": {"parallelism": 4, "completions": 4}}
    code, status = Http(cluster)("PATCH", path, both, "merge-patch+json")
    if minor == 24:
        assert code == 422 and "spec.completions: Invalid value: 4: field is immutable" in status["message"]
    else:
        cluster.wait(lambda: job_status(cluster).get("ready") == 4, "there are more")
    assert Http(cluster)("PATCH", path, {"spec": {"parallelism": 1}}, "merge-patch+json")[0] == 200
    cluster.wait(lambda: job_status(cluster).get("ready") == 1 and len(pods(cluster)) == 1, "one is left")
    assert pods(cluster)[0]["metadata"]["name"].startswith("t-0-")


def test_a_success_policy(make_cluster: Callable[..., Cluster]) -> None:
    """The first index is enough: the other pods are deleted, and the job is complete when they have ended."""
    cluster = make_cluster(minor=31)
    path = "/apis/batch/v1/namespaces/default/jobs"
    policy = {"rules": [{"succeededIndexes": "1,2", "succeededCount": 2}, {"succeededIndexes": "0"}]}
    script = "trap 'echo told; sleep 0.5; exit 7' TERM; [ $JOB_COMPLETION_INDEX = 0 ] && sleep 1 && exit 0; while :; do sleep 0.05; done"
    rule = {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [0]}}
    limits = {"pod": {"terminationGracePeriodSeconds": 20}, "podFailurePolicy": {"rules": [rule]}}
    one = job(script, completions=3, parallelism=2, successPolicy=policy, **limits)
    refused = {
        "requires indexed completion mode": {"completionMode": "NonIndexed", "successPolicy": policy},
        "at least one rules must be specified": {"successPolicy": {"rules": []}},
        'too large index: "3"': {"successPolicy": {"rules": [{"succeededIndexes": "3"}]}},
        "must be less than or equal to 1 (the number of indexes": {
            "successPolicy": {"rules": [{"succeededIndexes": "0", "succeededCount": 2}]}
        },
    }
    for words, changes in refused.items():
        code, status = Http(cluster)("POST", path, {**one, "spec": {**one["spec"], **changes}})
        assert code == 422 and words in status["message"], status
    cluster.create(one)
    code, status = Http(cluster)("PATCH", f"{path}/t", {"spec": {"successPolicy": None}}, "merge-patch+json")
    assert code == 422 and "spec.successPolicy" in status["message"] and "field is immutable" in status["message"]

    cluster.wait(lambda: cluster.ended("t") == "Complete", "the job is complete")
    status = job_status(cluster)
    met, complete = status["conditions"]
    assert (met["type"], complete["type"]) == ("SuccessCriteriaMet", "Complete")
    assert {(it["reason"], it["message"]) for it in (met, complete)} == {("SuccessPolicy", "Matched rules at index 1")}
    assert (status["succeeded"], status["completedIndexes"]) == (1, "0") and "failed" not in status, status
    assert met["lastTransitionTime"] <= complete["lastTransitionTime"] == status["completionTime"]
    assert [it["metadata"]["name"][:4] for it in cluster.all("Pod")] == ["t-0-"], "the others are gone"


def test_each_lost_pod_doubles_the_pause(make_cluster: Callable[..., Cluster]) -> None:
    """Of all pods of a job together, also of those that a policy ignores, until one succeeds."""
    cluster = make_cluster(minor=31, pace=0.01)
    rule = {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [7]}}
    script = "touch /data/$(date +%s.%N); [ $(ls /data | wc -l) -ge 6 ] || exit 7"
    data = cluster.claim("data")
    cluster.create(job(script, mounts={"d": "/data"}, volumes=[{"name": "d", "persistentVolumeClaim": {"claimName": "data"}}],
                       podFailurePolicy={"rules": [rule]}))  # fmt: skip
    cluster.wait(lambda: cluster.ended("t") == "Complete", "the last one succeeds")
    begun = sorted(float(path.name) for path in data.iterdir())
    pauses = [later - before for before, later in itertools.pairwise(begun)]
    assert all(pause >= wanted for pause, wanted in zip(pauses, (0.1, 0.2, 0.4, 0.8, 1.6), strict=True)), pauses


def test_a_node_loses_its_power(cluster: Cluster) -> None:
    cluster.create(job("sleep 1000", backoffLimit=5, pod={"terminationGracePeriodSeconds": 1}))
    first = pod(cluster, runs, "it runs")
    node, name = first["spec"]["nodeName"], first["metadata"]["name"]
    cluster.power_off(node)
    cluster.expire(node)
    second = pod(cluster, lambda one: runs(one) and one["metadata"]["name"] != name, "it is replaced elsewhere")
    assert second["spec"]["nodeName"] != node
    assert cluster.get("Pod", name)["metadata"]["deletionTimestamp"]  # nobody has seen it end
    cluster.delete("Pod", name, gracePeriodSeconds=0)
    assert cluster.get("Pod", name) is None
    cluster.back(node)
    cluster.cordon(second["spec"]["nodeName"])
    cluster.preempt(second["metadata"]["name"])
    pod(cluster, lambda one: runs(one) and one["spec"]["nodeName"] == node, "it is back")


PEERS = """python3 -c "
import os, socket, time
if os.environ['JOB_COMPLETION_INDEX'] == '1':
    server = socket.create_server(('', 9))
    connection = server.accept()[0]
    time.sleep(1000)
while True:
    try:
        connection = socket.create_connection(('t-1.t', 9))
        break
    except OSError:
        time.sleep(0.05)
print('connected', flush=True)
print('closed' if connection.recv(1) == b'' else 'data', flush=True)
" """


def test_a_crash_of_a_node_closes_connections(cluster: Cluster) -> None:
    cluster.create(service())
    spread = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"job-name": "t"}}}]}}  # fmt: skip
    cluster.create(job(PEERS, completions=2, pod={"affinity": spread, "terminationGracePeriodSeconds": 1}))
    eventually(lambda: cluster.written("t") == ["connected"], "they are connected")
    _, there = cluster.do(lambda: pods(cluster))
    cluster.crash(there["spec"]["nodeName"])
    eventually(lambda: cluster.written("t") == ["connected", "closed"], "one learns of it")
    node = cluster.get("Node", there["spec"]["nodeName"])
    assert node and [it["status"] for it in node["status"]["conditions"] if it["type"] == "Ready"] == ["Unknown"]
