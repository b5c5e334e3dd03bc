"""Jobs whose queue decides when they run: Kueue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually

from paceline.backends.kubernetes.manifests.names import QUEUE
from paceline.job.errors import UserError

from .user import User

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fake_kubernetes.cluster import Cluster
    from tests.conftest import Paceline

WAIT = "import threading; print('here', flush=True); threading.Event().wait()"


@pytest.fixture
def user(make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    """A user of a cluster with Kueue, which has no queue yet."""
    return User(make_cluster(minor=31, operators=["kueue", "training-operator"]), tmp_path, monkeypatch)


def add_queue(cluster: Cluster, policy: str = "None") -> None:
    meta, spec = {"name": "fast"}, {"stopPolicy": policy}
    cluster.create({"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "LocalQueue", "metadata": meta, "spec": spec})


def test_a_queue_that_is_not_there(user: User) -> None:
    refusal = "--queue slow: no LocalQueue of that name in namespace [^ ]+; "
    with pytest.raises(UserError, match=refusal + "there is none; leave --queue out, or have one made"):
        user.submit(WAIT, name="it", queue="slow")
    add_queue(user.cluster)
    with pytest.raises(UserError, match=refusal + "there are fast$"):
        user.submit(WAIT, name="it", queue="slow")
    assert not user.cluster.all("Job")


@pytest.mark.parametrize("kind", ["job", "pytorchjob"])
def test_a_job_that_is_stopped_stays_so(user: User, kind: str) -> None:
    """Its queue would let it run again, or begin later, if it were only suspended."""
    title = {"job": "Job", "pytorchjob": "PyTorchJob"}[kind]
    add_queue(user.cluster, "Hold")
    user.submit(WAIT, name="waits", kind=kind, queue="fast")
    eventually(lambda: user.cluster.all("Workload"), "Kueue has seen it")
    job = user.get("waits")
    assert (job.state, job.waiting) == ("PENDING", "queue fast has not admitted it yet")
    assert user.backend().stop(["waits"]) == {}
    assert user.get("waits").state == "STOPPED"
    user.cluster.patch("LocalQueue", "fast", {"spec": {"stopPolicy": "None"}})
    user.submit(WAIT, name="runs", kind=kind, queue="fast", grace="5s")
    user.wrote("runs", "here")
    assert user.backend().stop(["runs"]) == {}
    assert user.ended("runs").state == "STOPPED"
    user.submit("print('here')", name="last", kind=kind, queue="fast")
    assert user.ended("last").state == "SUCCEEDED", "Kueue has looked at all of them"
    for name in ("waits", "runs"):
        found = user.backend()._find(name)
        assert found.is_suspended and user.get(name).state == "STOPPED" and found.pods == []
        assert not (found.object.get("status") or {}).get("active")
    assert user.cluster.get(title, "runs")["metadata"]["labels"][QUEUE] == "fast"  # type: ignore[index]
    assert user.backend().delete(["waits", "runs", "last"]) == []
    eventually(lambda: not user.cluster.all("Workload"), "they go with their jobs")


@pytest.mark.parametrize("kind", ["job", "pytorchjob"])
def test_a_suspended_job_goes_back_to_its_queue(user: User, kind: str) -> None:
    add_queue(user.cluster)
    user.submit(WAIT, name="it", kind=kind, queue="fast", grace="5s")
    for round_ in (1, 2, 3):
        user.wrote("it", "here", round_)
        assert user.backend().suspend(["it"]) == {}
        eventually(lambda: user.get("it").state == "SUSPENDED", lambda: str(user.get("it")))
        assert user.backend().suspend(["it"]) == {}
        (workload,) = user.cluster.all("Workload")
        assert workload["spec"]["active"] is False
        assert user.backend().resume(["it"]) == {}
    user.wrote("it", "here", 4)
    assert user.backend().stop(["it"]) == {}
    assert user.ended("it").state == "STOPPED"


def test_a_job_that_kubectl_has_resumed_is_suspended_again(user: User) -> None:
    user.submit(WAIT, name="it", grace="5s")
    for round_ in (1, 2):
        user.wrote("it", "here", round_)
        assert user.backend().suspend(["it"]) == {}
        eventually(lambda: user.get("it").state == "SUSPENDED", lambda: str(user.get("it")))
        user.cluster.patch("Job", "it", {"spec": {"suspend": False}})
    assert user.backend().stop(["it"]) == {}
    assert user.ended("it").state == "STOPPED"


def test_a_job_that_its_queue_has_not_seen_yet_leaves_it(user: User) -> None:
    add_queue(user.cluster)
    user.submit(WAIT, name="it", queue="fast", annotations={"lab/idle": "no controller looks at it"})
    assert user.backend().stop(["it"]) == {}
    job = user.get("it")
    assert (job.state, job.queue) == ("STOPPED", "fast")
    assert QUEUE not in user.cluster.get("Job", "it")["metadata"]["labels"]  # type: ignore[index]


def test_in_the_foreground(paceline: Paceline, user: User) -> None:
    paceline.env["KUBECONFIG"] = str(user.cluster.kubeconfig)
    add_queue(user.cluster, "Hold")
    script = paceline.script("print('hello')")
    words = ("run", "--on", "kubernetes", "--image", "usual", "--queue", "fast", "--name", "it", script)
    running = paceline.start(*words)
    eventually(lambda: user.cluster.all("Workload"), "Kueue has seen it")
    holder, job = sorted(user.cluster.all("Job"), key=lambda it: it["spec"].get("suspend", False))
    assert job["metadata"]["name"] == "it"
    assert [it["uid"] for it in job["metadata"]["ownerReferences"]] == [holder["metadata"]["uid"]]
    assert holder["spec"]["parallelism"] == 0 and holder["spec"]["activeDeadlineSeconds"] > 0
    user.cluster.patch("LocalQueue", "fast", {"spec": {"stopPolicy": "None"}})
    out, err = running.communicate(timeout=120)
    assert (running.returncode, out) == (0, "hello\n"), err
    (left,) = user.cluster.all("Job")
    assert left["metadata"]["name"] == "it" and "ownerReferences" not in left["metadata"]


def test_what_may_not_be_stopped_goes_on(user: User) -> None:
    every = ["get", "list", "watch", "create", "patch", "delete"]
    mine = ["jobs", "pods", "pods/log", "services", "configmaps", "secrets", "events"]
    user.cluster.user("limited", rules=[{"apiGroups": ["", "batch"], "resources": mine, "verbs": every}])
    user.context = "limited"
    add_queue(user.cluster)
    user.submit(WAIT, name="it", queue="fast")
    user.wrote("it", "here")
    with pytest.raises(UserError, match=r"cannot list resource .workloads. .* the Role that allows it") as refused:
        user.backend().stop(["it"])
    assert "\n" not in str(refused.value)
    job = user.get("it")
    assert (job.state, job.waiting) == ("RUNNING", None)
    said = [it.what for it in user.backend().check(lambda *words: None).findings]  # type: ignore[arg-type]
    lacks = "list, get, patch workloads.kueue.x-k8s.io: paceline stop refuses jobs with a queue"
    assert any(lacks in it for it in said)
