"""The manifests of the kinds of operators, against the schemas that their makers publish."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_kubernetes import custom, resources, schema

from paceline.backends.kubernetes.look.pods import seen
from paceline.backends.kubernetes.manifests import objects
from paceline.backends.kubernetes.manifests.kinds.base import Kind
from paceline.backends.kubernetes.manifests.kinds.job import BatchJob, JobSet, TrainJob
from paceline.backends.kubernetes.manifests.kinds.kubeflow import PaddleJob, PyTorchJob, TFJob
from paceline.backends.kubernetes.manifests.kinds.mpijob import MPIJob
from paceline.backends.kubernetes.manifests.kinds.served import KINDS
from paceline.backends.kubernetes.manifests.order import Order
from paceline.backends.kubernetes.options import Options
from paceline.backends.packing import archive
from paceline.job.errors import UserError
from paceline.job.spec import JobSpec

KINDS_AND_VERSIONS = [kind(version) for kind in KINDS for version in kind.versions]


def order(kind: Kind, **given: Any) -> Order:
    options = Options.validated({key: given.pop(key) for key in [*given] if key in Options.__struct_fields__})
    spec = JobSpec.validated({"script": "train.py", "image": "training:1", **given})
    data = b"" if options.plain else archive().data
    return Order("it", spec, options, "ml", "1234", data, secrets={"HF": "s"}, kind=kind)


def checked(it: Order) -> dict[str, Any]:
    """The object of a job, and all that it owns, checked by the schemas of Kubernetes and of the operators."""
    schemas = {key: found for name in resources.CUSTOM for key, found in custom.schemas(name, 31).items()}
    checker = schema.Checker(31, schemas)
    it.check()
    it.kind.check(it)
    made = [it.kind.manifest(it), *it.kind.dependents(it)]
    served = [*resources.BUILT_IN, *(one for several in resources.CUSTOM.values() for one in several)]
    for manifest in made:
        key = manifest["apiVersion"], manifest["kind"]
        resource = next(one for one in served if (one.api_version, one.kind) == key)
        assert checker.check(resource, manifest, strict=True)["spec" if "spec" in manifest else "metadata"]
    first: dict[str, Any] = made[0]
    return first


def templates(found: Any) -> list[dict[str, Any]]:
    """All pod templates in a manifest."""
    if isinstance(found, list):
        return [it for one in found for it in templates(one)]
    if not isinstance(found, dict):
        return []
    here = [found["template"]] if "containers" in found.get("template", {}).get("spec", {}) else []
    return here + [it for one in found.values() for it in templates(one)]


POSSIBLE = {
    "nodes": 3, "devices": 2, "cpus": 4, "memory": "16Gi", "env": {"A": "1"}, "labels": {"team": "vision"},
    "data": ["training-data:/data"], "shm": "8Gi", "selector": {"disk": "ssd"}, "tolerations": "all",
    "time_limit": "60s",
    "placement": "spread", "service_account": "trainer", "annotations": {"a/b": "c"}, "pull_secrets": "registry",
    "ranks": 2, "resources": "rdma/hca=1",
}  # fmt: skip
BEYOND_A_RUNTIME = {
    "ttl": "60s",
    "priority_class": "high",
    "host_network": True,
    "ports": "8080",
    "pull_policy": "Always",
}


@pytest.mark.parametrize("kind", KINDS_AND_VERSIONS, ids=lambda kind: f"{kind.name}-{kind.version}")
def test_every_kind_has_what_a_user_sets(kind: Kind) -> None:
    given = {**POSSIBLE, **({} if isinstance(kind, TrainJob) else BEYOND_A_RUNTIME)}
    if kind.api_version == "kubeflow.org/v1alpha1":  # it has no such fields
        given = {key: given[key] for key in given if key not in ("ttl", "time_limit", "ranks")}
    if kind.version != "v1alpha1":
        given["queue"] = "fast"
        checked(order(kind))  # a job of one pod
    for plain in (True, False) if kind.api_version != "kubeflow.org/v1alpha1" else (True,):
        found = checked(order(kind, plain=plain, **given))
        assert kind.is_suspended(found) is ("queue" in given)
        assert kind.nodes(found) == 3 + (plain and isinstance(kind, MPIJob))
        assert kind.main_container(found)["command"][-1] == ("train.py" if plain else objects.MESSAGE)
        assert found["metadata"]["labels"]["app.kubernetes.io/instance"] == "it"
        assert found["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") == given.get("queue")
        assert kind.ttl(found) == (60 if "ttl" in given else None)
        assert ("activeDeadlineSeconds" in json.dumps(found["spec"])) is (plain and "time_limit" in given)
        for template in templates(found):
            pod = template["spec"]
            assert template["metadata"]["labels"]["app.kubernetes.io/instance"] == "it"
            assert (pod["nodeSelector"], pod["serviceAccountName"]) == ({"disk": "ssd"}, "trainer")
            assert pod.get("priorityClassName") == given.get("priority_class")
            assert {"name": "data-0", "mountPath": "/data"} in pod["containers"][0]["volumeMounts"]
        assert templates(found)


@pytest.mark.parametrize(
    "kind", [it for it in KINDS_AND_VERSIONS if it.version != "v1alpha1"], ids=lambda kind: kind.title
)
@pytest.mark.parametrize("gang", ["volcano", "coscheduling"])
def test_gangs(kind: Kind, gang: str) -> None:
    it = order(kind, nodes=3, gang=gang, queue="fast", priority_class="high")
    found = checked(it)
    groups = [one for one in it.kind.dependents(it) if one["kind"] == "PodGroup"]
    if kind.group == "kubeflow.org":
        policy = found["spec"]["runPolicy"]["schedulingPolicy"]
        assert (policy["minAvailable"], policy["priorityClass"]) == (3, "high") and not groups
        assert policy.get("queue") == ("fast" if gang == "volcano" else None)
    else:
        (group,) = groups
        assert group["spec"]["minMember"] == 3
        (template,) = templates(found)
        marks = {**template["metadata"]["labels"], **template["metadata"].get("annotations", {})}
        assert "it" in (marks.get("scheduling.k8s.io/group-name"), marks.get("scheduling.x-k8s.io/pod-group"))
    assert all("schedulerName" in template["spec"] for template in templates(found))
    is_kueue = "kueue.x-k8s.io/queue-name" in found["metadata"]["labels"]
    assert is_kueue == kind.is_suspended(found) == (gang == "coscheduling")


def test_what_a_kind_cannot_do_is_refused() -> None:
    old = MPIJob("v1alpha1")
    for kind, given, words in (
        (BatchJob(), {"worker_image": "b"}, "--worker-image: a Job has one template"),
        (JobSet(), {"clean_pods": "all"}, "--clean-pods: a JobSet keeps"),
        (PaddleJob(), {"worker_image": "b"}, "--worker-image: a PaddleJob has one"),
        (TrainJob(), {"ttl": "3s"}, "--ttl: a TrainJob has it from its runtime"),
        (TrainJob(), {"gang": "volcano"}, "--gang: a TrainJob has it"),
        (TrainJob(), {"pod_template": {"spec": {"schedulerName": "x"}}}, "a TrainJob cannot change schedulerName of"),
        (old, {}, "--kind mpijob: an MPIJob of kubeflow.org/v1alpha1 runs nothing but sleep in workers; add --plain"),
        (old, {"plain": True, "queue": "q"}, "--queue: an MPIJob of kubeflow.org/v1alpha1 here has no suspend; leave"),
        (old, {"plain": True, "ranks": 2}, "-n: an MPIJob of kubeflow.org/v1alpha1 here has no slotsPerWorker; leave"),
    ):  # fmt: skip
        with pytest.raises(UserError) as refused:
            kind.check(order(kind, **given))
        assert words in str(refused.value)


def test_roles() -> None:
    for kind, first in ((PyTorchJob(), "Master"), (TFJob(), "Chief"), (MPIJob(), "Launcher")):
        roles = checked(order(kind, nodes=3, worker_image="other:1"))["spec"][kind.field]
        assert {name: role["replicas"] for name, role in roles.items()} == {first: 1, "Worker": 2}
        images = [role["template"]["spec"]["containers"][0]["image"] for role in roles.values()]
        assert images == ["training:1", "other:1"]
        assert [*checked(order(kind))["spec"][kind.field]] == [first], "a job of one node"
    assert [*checked(order(PaddleJob(), nodes=3))["spec"]["paddleReplicaSpecs"]] == ["Worker"]


def test_a_plain_mpijob_has_workers_besides_its_launcher() -> None:
    spec = checked(order(MPIJob(), plain=True, nodes=2, devices=4, script=None, command="mpirun"))["spec"]
    launcher, worker = (spec["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    assert (launcher["replicas"], worker["replicas"], spec["slotsPerWorker"]) == (1, 2, 1)
    main, other = (it["template"]["spec"]["containers"][0] for it in (launcher, worker))
    assert main["command"] == ["mpirun"] and "command" not in other, "its operator starts sshd there"
    assert main["resources"] == {"limits": {}, "requests": {}} and other["resources"]["limits"] == {
        "nvidia.com/gpu": "4"
    }


def test_launchers_of_mpijobs() -> None:
    """They are node 0 with agents. The operator of v1 has them reach the workers with an account of its own."""
    for version, as_worker in (("v2beta1", True), ("v1", None)):
        spec = checked(order(MPIJob(version), nodes=2, devices=4))["spec"]
        assert spec.get("runLauncherAsWorker") is as_worker
        launcher, worker = (spec["mpiReplicaSpecs"][role]["template"] for role in ("Launcher", "Worker"))
        assert launcher["spec"]["containers"][0]["resources"] == worker["spec"]["containers"][0]["resources"]
        assert ("automountServiceAccountToken" in launcher["spec"]) is (as_worker is not None)
        assert worker["spec"]["automountServiceAccountToken"] is False
    for label, name, number in (("0", "it-worker-0", 1), ("1", "it-worker-0", 1), ("2", "it-worker-1", 2)):
        marks = {"app.kubernetes.io/instance": "it", "paceline.dev/first-node": "1",
                 "training.kubeflow.org/replica-index": label}  # fmt: skip
        meta = {"name": name, "creationTimestamp": "2026-01-01T00:00:00Z", "labels": marks}
        assert seen({"metadata": meta, "spec": {"containers": [{"name": "main"}]}}).index == number


def test_an_elastic_pytorchjob() -> None:
    given: dict[str, Any] = {"plain": True, "nodes": "2:4", "script": None, "command": "torchrun", "args": ["train.py"]}
    spec = checked(order(PyTorchJob(), **given, max_restarts=5))["spec"]
    policy = {"minReplicas": 2, "maxReplicas": 4, "rdzvBackend": "c10d", "maxRestarts": 5}
    assert spec["elasticPolicy"] == policy and spec["runPolicy"]["backoffLimit"] == 5
    assert {name: role["replicas"] for name, role in spec["pytorchReplicaSpecs"].items()} == {"Worker": 4}
    assert PyTorchJob().nodes({"spec": spec}) == 4
    assert PyTorchJob().main_container({"spec": spec})["command"] == ["torchrun", "train.py"]
