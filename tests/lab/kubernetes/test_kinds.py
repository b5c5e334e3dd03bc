"""Jobs as objects of operators' kinds, from submit to delete."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from paceline.job.errors import UserError

from .user import User

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Paceline

    from .cluster import Cluster

SUM = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    print("sum", total.item(), "of", dist.get_world_size(), flush=True)
"""


@pytest.fixture
def make_user(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., User]:
    """A user of a cluster that has these operators."""

    def make(*operators: str, **options: Any) -> User:
        return User(make_cluster(operators=operators, **options), tmp_path, monkeypatch)

    return make


def test_a_pytorchjob_from_submit_to_delete(make_user: Callable[..., User]) -> None:
    user = make_user("training-operator")
    user.submit(SUM, name="sum", nodes=2, ranks=2, kind="pytorchjob", worker_image="other", secrets=[])
    job = user.ended("sum")
    assert (job.state, job.ranks, job.exit_code) == ("SUCCEEDED", 4, 0), job
    assert [it.node.partition("/")[2] for it in job.instances] == ["sum-master-0"] * 2 + ["sum-worker-0"] * 2
    assert user.lines("sum") == ["sum 6.0 of 4"] * 4
    images = {it["metadata"]["name"]: it["spec"]["containers"][0]["image"] for it in user.cluster.all("Pod")}
    assert images == {"sum-master-0": "usual", "sum-worker-0": "other"}
    assert user.cluster.all("Job") == [], "what has kept it together while it was made is gone"
    assert [it.name for it in user.backend().describe().jobs] == ["sum"]
    with pytest.raises(UserError, match="a job named sum is in this namespace"):
        user.submit(SUM, name="sum")
    assert user.backend().delete(["sum"]) == []
    user.nothing_left("sum")


def test_what_a_cluster_does_not_serve_is_refused(make_user: Callable[..., User]) -> None:
    user = make_user()
    with pytest.raises(UserError, match=r"does not serve PyTorchJob kubeflow.org/v1, which .* brings; it serves job$"):
        user.submit("", name="it", kind="pytorchjob")
    user.cluster.install("training-operator")
    with pytest.raises(UserError, match=r"^--gang volcano: the cluster has no PodGroup scheduling.volcano.sh/v1beta1"):
        user.submit("", name="it", kind="pytorchjob", gang="volcano")
    with pytest.raises(UserError, match=r"^--worker-image: a Job has one template for all pods"):
        user.submit("", name="it", worker_image="other")
    user.nothing_left("it")


def test_in_the_foreground(paceline: Paceline, make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(operators=["training-operator"])
    paceline.env["KUBECONFIG"] = str(cluster.kubeconfig)
    where = ("--on", "kubernetes", "--image", "usual", "--kind", "pytorchjob")
    done = paceline("run", *where, "--name", "it", paceline.script("print('hello')"))
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    found = cluster.get("PyTorchJob", "it")
    assert found and "ownerReferences" not in found["metadata"] and cluster.all("Job") == []
    long = paceline.script("import time; print(1, flush=True); time.sleep(600)")
    running = paceline.start("run", *where, "--name", "long", long)
    assert running.stdout is not None and running.stdout.readline() == "1\n"
    (owner,) = cluster.get("PyTorchJob", "long")["metadata"]["ownerReferences"]  # type: ignore[index]
    assert owner["kind"] == "Job" and cluster.get("Job", "long"), "which ends when the client is killed"
    running.send_signal(signal.SIGINT)
    out = running.communicate(timeout=120)
    assert "stop" in out[1], out
    assert '"state": "STOPPED"' in paceline("get", "--on", "kubernetes", "long", "-o", "json").stdout
