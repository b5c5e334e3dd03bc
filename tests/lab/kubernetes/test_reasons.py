"""Why a job waits or has failed is said in plain words, with what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from paceline.job.errors import UserError

from .user import Silence, User

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fake_kubernetes.cluster import Cluster

FOREVER = "import threading; print('here', flush=True); threading.Event().wait()"


def test_why_a_job_waits(user: User) -> None:
    user.submit("pass", name="gpus", devices=99)
    user.submit("pass", name="nodes", selector="disk=none")
    user.submit("pass", name="claim", pod_template={"spec": {"volumes": [
        {"name": "c", "persistentVolumeClaim": {"claimName": "nope"}}
    ]}})  # fmt: skip
    user.submit("pass", name="image", image="missing")
    user.submit("pass", name="refer", pod_template={"spec": {"containers": [
        {"name": "main", "env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "nope", "key": "k"}}}]}
    ]}})  # fmt: skip
    user.submit(
        "pass", name="mount", pod_template={"spec": {"volumes": [{"name": "c", "configMap": {"name": "nope"}}]}}
    )
    for name, said in {
        "gpus": "no node has enough nvidia.com/gpu free: ask for less, or wait",
        "nodes": "nodes do not match --selector",
        "claim": "no PersistentVolumeClaim nope in the namespace; see paceline data list",
        "image": "image missing cannot be pulled: ",
        "refer": 'its container cannot be made: secret "nope" not found',
        "mount": 'a volume cannot be mounted: MountVolume.SetUp failed for volume "c" : configmap "nope" not found',
    }.items():
        job = user.until(name, lambda job, said=said: said in (job.waiting or ""))
        assert job.state == "PENDING" and job.waiting is not None and "node 0 (" in job.waiting
    assert "no such host" in str(user.get("image").waiting)
    with pytest.raises(UserError, match="job gpus has not ended; stop it first with paceline stop gpus"):
        user.backend().delete(["gpus", "image"])
    user.backend().stop(["gpus", "image"], now=True)
    assert [user.ended(name).state for name in ("gpus", "image")] == ["STOPPED"] * 2
    user.backend().delete(["gpus", "image"])
    user.nothing_left("gpus")


def test_what_could_never_run_is_refused(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = User(make_cluster(0), tmp_path, monkeypatch)
    (finding,) = user.backend().check(Silence()).findings
    assert (finding.level, finding.what) == ("error", "has no node that is ready for pods")
    user.cluster.housekeeping.binds = False
    classes = "storage.k8s.io/v1"
    for name, mode in (("later", "WaitForFirstConsumer"), ("now", "Immediate")):
        user.cluster.create({
            "apiVersion": classes, "kind": "StorageClass", "metadata": {"name": name}, "provisioner": "x",
            "volumeBindingMode": mode,
        })  # fmt: skip
        user.cluster.create({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
            "spec": {"storageClassName": name, "accessModes": ["ReadWriteOnce"],
                     "resources": {"requests": {"storage": "1Gi"}}},
        })  # fmt: skip
    for given, words in (
        ({"data": ["nope:/data"]}, "^--data nope: no PersistentVolumeClaim of that name in namespace default; see pac"),
        ({"data": ["now:/data"]}, "^--data now: the PersistentVolumeClaim is Pending, and not bound to a volume; its"),
        ({"image": "UPPER CASE"}, "^--image UPPER CASE: not the name of an image: it has lower-case letters"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            user.submit("pass", name="it", **given)
    user.submit("pass", name="it", data=["later:/data"])
    assert [job.name for job in user.backend().describe().jobs] == ["it"], "it is bound when its first pod has a node"


def test_why_a_job_has_failed(user: User) -> None:
    user.submit("pass", name="python", image="no-python")
    user.submit("pass", name="old", image="python:3.8")
    user.submit("import torch", name="torch", image="no-torch")
    user.submit("def f():\n    raise ValueError('no good')\nf()", name="raise", nodes=2)
    user.submit(FOREVER, name="memory")
    user.submit(FOREVER, name="evicted")
    for name in ("memory", "evicted"):
        user.wrote(name, "here")
    pods = {pod["metadata"]["labels"]["job-name"]: pod["metadata"]["name"] for pod in user.cluster.all("Pod")}
    user.cluster.oom(pods["memory"])
    user.cluster.evict(pods["evicted"])
    for name, said in {
        "python": "image no-python has no python3; name its Python with --image-python",
        "old": "too old; name Python 3.9 or newer with --image-python",
        "torch": "torch is not installed for ",
        "raise": "ValueError: no good",
        "memory": "killed: out of memory; ask for more with --memory",
    }.items():
        job = user.ended(name)
        assert (job.state, said in (job.error or "")) == ("FAILED", True), job
    failed = user.get("raise")
    assert (failed.exit_code, [rank.state for rank in failed.instances].count("FAILED") >= 1) == (1, True)
    assert "rank" in str(failed.error)


def test_quota_and_what_lacks_permission(user: User) -> None:
    user.cluster.quota(pods="1")
    user.submit(FOREVER, name="two", nodes=2)
    job = user.until("two", lambda job: "exceeded quota: q" in (job.waiting or ""))
    assert "have the quota of the namespace raised" in str(job.waiting)
    user.cluster.patch("Job", "two", {"metadata": {"annotations": {"lab/idle": "its controller waits"}}})
    user.cluster.patch("ResourceQuota", "q", {"spec": {"hard": {"pods": "2"}}})
    user.until("two", lambda job: job.waiting == "quota q has room again; the cluster makes the pods when it tries next"
                                                 ", within minutes")  # fmt: skip
    user.cluster.patch("Job", "two", {"metadata": {"annotations": {"lab/idle": None}}})
    user.until("two", lambda job: job.state == "RUNNING" and job.waiting is None)


def test_limits_that_pods_do_not_keep(user: User) -> None:
    user.submit("open('big', 'wb').write(bytes(80 << 20))\n" + FOREVER, name="big", work_size="64Mi")
    said = (
        'evicted by its node: Usage of EmptyDir volume "work" exceeds the limit "64Mi"; give it more with --work-size'
    )
    assert said in str(user.ended("big").error)
    user.cluster.quota(**{"requests.cpu": "10", "limits.memory": "10Gi"})
    user.submit("pass", name="unsaid")
    said = "failed quota: q: must specify limits.memory for: main; requests.cpu for: main; ask for it with --cpus and"
    user.until("unsaid", lambda job: said in (job.waiting or ""))
    user.submit("pass", name="said", cpus=1, memory="1Gi")
    assert user.ended("said").state == "SUCCEEDED"


def test_a_job_whose_pods_never_end_has_failed(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = User(make_cluster(minor=31), tmp_path, monkeypatch)
    user.submit(FOREVER, name="it", nodes=2, placement="spread")
    user.wrote("it", "here", 2)
    nodes = {pod["spec"]["nodeName"]: pod["metadata"]["name"] for pod in user.cluster.all("Pod")}
    assert len(nodes) == 2
    user.cluster.lose("node-1")  # its pod is never known to have ended
    user.cluster.kill(nodes["node-2"])
    assert (user.ended("it").state, user.cluster.ended("it")) == ("FAILED", "")


def test_events_of_lost_pods_with_long_names(user: User) -> None:
    name = "a" * 60
    user.submit(FOREVER, name=name)
    user.until(name, lambda job: job.state == "RUNNING")
    (pod,) = user.cluster.all("Pod")
    user.cluster.evict(pod["metadata"]["name"])
    user.ended(name)
    user.cluster.delete("Pod", pod["metadata"]["name"])
    events = {(event["event"], event.get("host")) for event in user.backend().events(name)}
    assert ("Evicted", pod["metadata"]["name"]) in events


@pytest.mark.parametrize("minor", [24, 31])
def test_pods_that_are_taken_away_from_a_running_job(
    make_cluster: Callable[..., Cluster], minor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = User(make_cluster(minor=minor), tmp_path, monkeypatch)  # from 1.26 on, jobs count pods with finalizers
    for name in ("deleted", "preempted", "killed"):
        user.submit(FOREVER, name=name, nodes=2)
    for name in ("deleted", "preempted", "killed"):
        user.wrote(name, "here", 2)
    pods = {pod["metadata"]["labels"]["job-name"]: pod["metadata"]["name"] for pod in user.cluster.all("Pod")}
    user.cluster.delete("Pod", pods["deleted"])
    user.cluster.preempt(pods["preempted"])
    user.cluster.kill(pods["killed"])
    for name in ("deleted", "preempted"):
        job = user.ended(name)
        assert (job.state, "a pod of the job was deleted, evicted or preempted" in str(job.error)) == (
            "FAILED",
            True,
        ), job
    job = user.ended("killed")
    assert job.state == "FAILED" and job.exit_code == 137, job
