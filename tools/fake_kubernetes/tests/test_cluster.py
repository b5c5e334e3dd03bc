"""The lab itself: what a real cluster does, it does, and the real kubectl can read it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fake_kubernetes.machine import processes_of

from .support import CONFIG, eventually, job, service

if TYPE_CHECKING:
    from collections.abc import Callable

    from fake_kubernetes.cluster import Cluster

pytestmark = pytest.mark.usefixtures("kubectl")


def test_a_job_runs_with_its_names_and_its_files(cluster: Cluster) -> None:
    script = """
        cat /config/a; hostname; echo $JOB_COMPLETION_INDEX
        until getent hosts t-0.t && getent hosts t-1.t.default; do sleep 0.05; done
        touch /both/$(hostname); until test -e /both/t-0 -a -e /both/t-1; do sleep 0.05; done  # a pod that has ended has no name
    """
    volumes = [{"name": "c", "configMap": {"name": "c"}}, {"name": "d", "persistentVolumeClaim": {"claimName": "d"}}]
    one = job(script, completions=2, volumes=volumes, mounts={"c": "/config", "d": "/both"})
    cluster.claim("d")
    cluster.apply(CONFIG, service(), one)
    cluster.wait(lambda: cluster.ended("t"), "the job ends")
    status = cluster.get("Job", "t")["status"]
    assert status["succeeded"] == 2 and status["completedIndexes"] == "0-1" and status["completionTime"]
    assert [one["type"] for one in status["conditions"]] == ["Complete"]
    for index, pod in enumerate(sorted(cluster.all("Pod"), key=lambda pod: pod["metadata"]["name"])):
        assert pod["metadata"]["name"].startswith(f"t-{index}-") and pod["status"]["phase"] == "Succeeded"
        lines = cluster.kubectl("logs", pod["metadata"]["name"]).stdout.splitlines()
        assert lines[:3] == ["hello", f"t-{index}", str(index)]
        assert [line.split()[1] for line in lines[-2:]] == [f"t-{i}.t.default.svc.cluster.local" for i in (0, 1)]
    cluster.kubectl("delete", "job", "t")
    cluster.wait(lambda: not list(cluster.storage.all(cluster.resource("Pod"))), "its pods are gone")


def test_kubectl_reads_everything(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(minor=31, operators=["training-operator", "jobset"])
    cluster.apply(service(), job("echo ready; sleep 1000", completions=2))
    cluster.wait(
        lambda: (cluster.storage.get(cluster.resource("Job"), "default", "t").get("status") or {}).get("ready") == 2,
        "it runs",
    )
    pods = cluster.kubectl("get", "pods", "-o", "wide").stdout.splitlines()
    assert pods[0].split() == ["NAME", "READY", "STATUS", "RESTARTS", "IP", "NODE", "AGE"]
    assert pods[1].split()[1:4] == ["1/1", "Running", "0"]
    assert "0/2" in cluster.kubectl("get", "jobs").stdout
    assert "Ready" in cluster.kubectl("get", "nodes").stdout
    described = cluster.kubectl("describe", "job", "t").stdout
    assert "Created pod: t-0-" in described and "2 Active (2 Ready) / 0 Succeeded / 0 Failed" in described
    described = cluster.kubectl("describe", "pods", "-l", "job-name=t").stdout
    assert "Successfully assigned default/t-0-" in described and "State:          Running" in described
    described = cluster.kubectl("describe", "nodes").stdout
    assert "nvidia.com/gpu:     8" in described and "Non-terminated Pods:          (1 in total)" in described
    # What is unknown is refused by name; the same again changes nothing; a change is a change.
    refused = cluster.apply(job("true", completionz=1), check=False)
    assert refused.returncode == 1 and 'unknown field "spec.completionz"' in refused.stderr
    assert "unchanged" in cluster.apply(service()).stdout
    labelled = {**service(), "metadata": {"name": "t", "labels": {"a": "b"}}}
    assert "configured" in cluster.apply(labelled).stdout
    several = {"apiVersion": "v1", "kind": "List", "items": [CONFIG, {**service(), "metadata": {"name": "other"}}]}
    assert cluster.apply(several).stdout == "configmap/c created\nservice/other created\n"
    assert (
        cluster.kubectl("wait", "--for=condition=ready", "pod", "-l", "job-name=t").stdout.count("condition met") == 2
    )
    assert cluster.kubectl("auth", "can-i", "create", "jobs").stdout == "yes\n"
    assert "Unauthorized" in cluster.kubectl("--context", "wrong-token", "get", "pods", check=False).stderr
    cluster.kubectl("delete", "job", "t")
    cluster.wait(lambda: not list(cluster.storage.all(cluster.resource("Pod"))), "its pods are gone")


def test_a_deployment_runs(cluster: Cluster) -> None:
    labels = {"app": "board"}
    container = {"name": "main", "image": "any", "command": ["sleep", "1000"]}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container], "terminationGracePeriodSeconds": 0}}
    spec = {"selector": {"matchLabels": labels}, "template": template}
    cluster.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "board"}, "spec": spec})
    deployments = cluster.resource("Deployment")
    cluster.wait(
        lambda: cluster.storage.get(deployments, "default", "board")["status"].get("readyReplicas") == 1, "it is ready"
    )
    cluster.kubectl("scale", "deployment", "board", "--replicas", "2")
    cluster.wait(
        lambda: cluster.storage.get(deployments, "default", "board")["status"].get("readyReplicas") == 2,
        "both are ready",
    )
    cluster.kubectl("delete", "deployment", "board")
    cluster.wait(lambda: not list(cluster.storage.all(cluster.resource("Pod"))), "its pods are gone")


def test_nothing_is_left(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster()
    cluster.create(job("trap '' TERM; while :; do sleep 1; done", completions=2))
    cluster.wait(
        lambda: (cluster.storage.get(cluster.resource("Job"), "default", "t").get("status") or {}).get("ready") == 2,
        "it runs",
    )
    assert cluster.processes()
    cluster.stop()
    assert not cluster.processes() and not cluster.folder.exists()
    assert not [path for path in Path("/run/netns").iterdir() if path.name.startswith(f"{cluster.prefix}-")]


def test_what_pods_use(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(minor=31, operators=["metrics-server"])
    cluster.create(job("while :; do :; done", "busy"))
    cluster.create(job("sleep 1000", "idle"))
    jobs = cluster.resource("Job")
    cluster.wait(
        lambda: all((one.get("status") or {}).get("ready") == 1 for one in cluster.storage.all(jobs)), "both run"
    )
    (of_busy, cpu, memory), (of_idle, idle, _) = sorted(
        line.split() for line in cluster.kubectl("top", "pods", "--no-headers").stdout.splitlines()
    )
    assert of_busy.startswith("busy-0-") and of_idle.startswith("idle-0-") and memory.endswith("Mi")
    assert int(cpu.rstrip("m")) >= int(idle.rstrip("m"))
    assert "node-1" in cluster.kubectl("top", "nodes").stdout


KILLED = """
import os, sys
from fake_kubernetes.cluster import Cluster
from fake_kubernetes.tests.support import job
cluster = Cluster(1)
cluster.start()
cluster.create(job("trap '' TERM; while :; do sleep 1; done"))
jobs = cluster.resource("Job")
cluster.wait(lambda: any((one.get("status") or {}).get("ready") for one in cluster.storage.all(jobs)), "it runs")
print(cluster.prefix, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_killed_lab_is_removed(make_cluster: Callable[..., Cluster]) -> None:
    root = Path(__file__).parents[2]
    killed = subprocess.run([sys.executable, "-c", KILLED], cwd=root, capture_output=True, text=True, check=False)
    prefix = killed.stdout.strip()
    assert prefix and killed.returncode == -9, killed.stderr
    eventually(lambda: not processes_of(prefix), "its pods have ended with it")
    make_cluster(0)  # the next one removes what it has left
    assert not list(Path("/run/netns").glob(f"{prefix}-*"))
    assert not list(Path(tempfile.gettempdir()).glob(f"{prefix}-*"))
