"""The kinds of operators in the lab: served when they are installed, and checked by their own schemas."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest

from fake_kubernetes.client import Http
from fake_kubernetes.resources import CUSTOM

from .support import job

if TYPE_CHECKING:
    from collections.abc import Callable

    from fake_kubernetes.cluster import Cluster

TEMPLATE = {"spec": {"containers": [{"name": "pytorch", "image": "any", "command": ["true"]}]}}


def pytorch_job() -> dict[str, Any]:
    replicas = {"replicas": 1, "restartPolicy": "Never", "template": TEMPLATE}
    spec = {"pytorchReplicaSpecs": {"Master": replicas}, "runPolicy": {"cleanPodPolicy": "None"}, "nprocPerNode": "2"}
    return copy.deepcopy(
        {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "p"}, "spec": spec}
    )


def test_schemas_of_custom_kinds(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(0)
    http, path = Http(cluster), "/apis/kubeflow.org/v1/namespaces/default/pytorchjobs"
    assert http("POST", path, pytorch_job()) == (404, "404 page not found\n")
    cluster.install("training-operator")
    code, made = http("POST", f"{path}?fieldValidation=Strict&dryRun=All", pytorch_job())
    assert code == 201 and made["spec"] == pytorch_job()["spec"]
    wrong = pytorch_job()
    wrong["spec"]["runPolicy"]["cleanPods"] = "All"
    code, status = http("POST", f"{path}?fieldValidation=Strict", wrong)
    assert code == 400 and 'unknown field "spec.runPolicy.cleanPods"' in status["message"]
    wrong = pytorch_job()
    wrong["spec"]["nprocPerNode"] = 2
    del wrong["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["name"]
    code, status = http("POST", path, wrong)
    assert code == 422 and {cause["field"] for cause in status["details"]["causes"]} == {
        "spec.nprocPerNode", "spec.pytorchReplicaSpecs.Master.template.spec.containers[0].name",
    }  # fmt: skip
    assert 'in body must be of type string: "integer"' in status["message"]
    # What an operator's webhook would refuse passes: there is no webhook.
    other = pytorch_job()
    other["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["name"] = "main"
    assert http("POST", path, other)[0] == 201
    cluster.uninstall("training-operator")
    assert http("GET", f"{path}/p") == (404, "404 page not found\n")


@pytest.mark.parametrize("operator", sorted({*CUSTOM} - {"metrics-server"}))
def test_operators(make_cluster: Callable[..., Cluster], operator: str) -> None:
    cluster = make_cluster(0, operators=[operator])
    http = Http(cluster)
    for one in CUSTOM[operator]:
        place = "namespaces/default/" if one.namespaced else ""
        body = {
            "apiVersion": one.api_version,
            "kind": one.kind,
            "metadata": {"name": "x"},
            "spec": {"surely-unknown": 1},
        }
        code, status = http("POST", f"/apis/{one.api_version}/{place}{one.plural}?fieldValidation=Strict", body)
        known = one.group != "kueue.x-k8s.io" and one.kind != "Queue"
        assert (code == 400) == known, status
        assert cluster.get("CustomResourceDefinition", one.qualified)


def test_a_job_set_and_a_train_job(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(0, operators=["jobset", "trainer"])
    http = Http(cluster)
    of_job = {"spec": job("true")["spec"]}
    spec = {
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": of_job}],
        "failurePolicy": {"maxRestarts": 3},
    }
    body = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "x"}, "spec": spec}
    code, made = http("POST", "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets?fieldValidation=Strict", body)
    assert code == 201, made
    trainer = {"numNodes": 2, "image": "any", "command": ["true"]}
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer, "suspend": True}
    body = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": "x"}, "spec": spec}
    path = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs"
    code, made = http("POST", f"{path}?fieldValidation=Strict", body)
    assert code == 201, made
    # A custom resource takes merge patches only.
    assert http("PATCH", f"{path}/x", {"spec": {"suspend": False}}, "strategic-merge-patch+json")[0] == 415
    assert http("PATCH", f"{path}/x", {"spec": {"suspend": False}}, "merge-patch+json")[1]["spec"]["suspend"] is False


@pytest.mark.usefixtures("kubectl")
def test_kubectl_applies_custom_kinds(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(0, operators=["training-operator"])
    cluster.apply(pytorch_job())
    more = pytorch_job()
    more["spec"]["pytorchReplicaSpecs"]["Worker"] = {"replicas": 2, "template": TEMPLATE}
    assert "configured" in cluster.apply(more).stdout
    stored = cluster.get("PyTorchJob", "p")
    assert stored and stored["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 2
    more["spec"]["nope"] = 1
    refused = cluster.apply(more, check=False)
    assert refused.returncode == 1 and 'unknown field "spec.nope"' in refused.stderr
    assert "p " in cluster.kubectl("get", "pytorchjobs").stdout
    cluster.kubectl("delete", "pytorchjob", "p")
