"""Pods that are lost, and others in their place: the job goes on, and every sample is trained on exactly once."""

from __future__ import annotations

import re
import textwrap
import time
from typing import TYPE_CHECKING, Any

import pytest
from fake_kubernetes.client import Http
from tests.conftest import eventually
from tests.lab.test_elastic import TRAIN

from paceline.job.errors import UserError

from .user import User

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fake_kubernetes.cluster import Cluster

NAME = "it"
STAY = """
    import os, time
    print("one of", os.environ["WORLD_SIZE"], flush=True)
    while not os.path.exists("/end/now"):
        time.sleep(0.05)
    print("done", flush=True)
"""


class Lasting:
    """A job that lasts until it is asked to end."""

    def __init__(self, user: User, script: str = STAY, **given: Any) -> None:
        self.user, self.cluster = user, user.cluster
        self.end = user.cluster.claim("end") / "now"
        self._seen: dict[int, int] = {}
        user.submit(script, name=NAME, data=["end:/end"], **given)

    def pod(self, index: int) -> dict[str, Any]:
        """The newest pod of an index that is not leaving; {} if there is none now."""
        found = [
            pod
            for pod in self.cluster.all("Pod")
            if pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] == str(index)
            and not pod["metadata"].get("deletionTimestamp")
            and pod["status"].get("phase") not in ("Failed", "Succeeded")
        ]
        return found[-1] if found else {}

    def name(self, index: int) -> str:
        """Its name."""
        return str(self.pod(index)["metadata"]["name"])

    def runs(self, world: int) -> None:
        """Wait until all ranks of an attempt with so many have begun, and no one of before is counted."""
        wanted = self._seen.get(world, 0) + world

        def have_begun() -> bool:
            assert not self.cluster.ended(NAME), "the job has ended"
            self._seen[world] = self.user.written(NAME, f"one of {world}")
            return self._seen[world] >= wanted

        eventually(have_begun, lambda: f"{wanted} ranks of {world}: {self.state()}")

    def state(self) -> str:
        """All that is known."""
        pods = "\n".join(f"{pod['metadata']}: {pod['status']}" for pod in self.cluster.all("Pod"))
        return f"{self.user.get(NAME)}\n{self.cluster.written(NAME)}\n{pods}"

    def ends_well(self) -> None:
        self.end.touch()
        job = self.user.ended(NAME)
        assert job.state == "SUCCEEDED", self.state()


def test_logs_end_with_a_job_that_has_lost_a_node(user: User) -> None:
    job = Lasting(user, nodes=2, max_restarts=1, silence="60s", placement="spread")
    job.runs(2)
    node = job.pod(0)["spec"]["nodeName"]
    user.cluster.crash(node)
    user.cluster.expire(node)
    job.runs(2)
    assert user.lines(NAME, None, attempt=1) == ["one of 2"] * 2
    job.ends_well()
    assert user.lines(NAME, (1,), follow=True)[-1] == "done"


@pytest.mark.nightly  # it waits until the silence is long enough
def test_a_node_that_is_lost_without_a_word_is_replaced(user: User) -> None:
    job = Lasting(user, nodes=2, max_restarts=1, silence="20s", placement="spread")
    job.runs(2)
    node = job.pod(0)["spec"]["nodeName"]
    user.cluster.power_off(node)
    user.cluster.expire(node)
    job.runs(2)
    job.ends_well()


@pytest.mark.parametrize("minor", [24, 31])
def test_a_job_of_min_to_max_pods(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minor: int
) -> None:
    cluster = make_cluster(minor=minor, capacity={"nvidia.com/gpu": "1"})
    user = User(cluster, tmp_path, monkeypatch)
    job = Lasting(user, nodes="1:3", devices=1, silence="60s")
    job.runs(2)
    found = user.get(NAME)
    assert (found.nodes, found.ranks, found.state) == (2, 2, "RUNNING")
    assert "no node has enough nvidia.com/gpu free" in str(found.waiting)
    if minor == 24:
        (left,) = user.backend().scalein(NAME, 2)[:1]
        job.runs(1)
        with pytest.raises(UserError, match="needs 1 pods, and 0 would be left"):
            user.backend().scalein(NAME, 1)
        assert left in user.backend().scaleout(NAME, None)
        job.runs(2)
        cluster.delete("Pod", job.name(0))
        job.runs(2)
    job.ends_well()
    if minor == 31:  # the third pod begins when one of the two has ended; the job ends with pod 0, and takes it away
        cluster.wait(lambda: cluster.ended(NAME) == "Complete", "the job has ended")
        assert {pod["metadata"]["name"][:4] for pod in cluster.all("Pod")} == {"it-0", "it-1"}, job.state()
        assert (user.lines(NAME, (0,))[-1], user.lines(NAME, (1,))[-1]) == ("done", "done")
        assert user.get(NAME).state == "SUCCEEDED"


def test_a_job_of_min_to_max_pods_ends_with_the_pods_that_it_had(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(1, minor=31, capacity={"nvidia.com/gpu": "1"})
    job = Lasting(User(cluster, tmp_path, monkeypatch), nodes="1:2", devices=1)
    job.runs(1)
    job.ends_well()
    cluster.wait(lambda: cluster.ended(NAME) == "Complete", "the job has ended")
    assert [pod["metadata"]["name"][:4] for pod in cluster.all("Pod")] == ["it-0"], job.state()


def test_a_pod_0_that_comes_when_the_job_has_succeeded_ends_it(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(minor=31, capacity={"nvidia.com/gpu": "1"})
    job = Lasting(User(cluster, tmp_path, monkeypatch), nodes="1:2", devices=1, placement="spread")
    job.runs(2)
    node = job.pod(0)["spec"]["nodeName"]
    cluster.cordon(node)
    cluster.delete("Pod", job.name(0))
    job.runs(1)
    job.end.touch()
    job.user.wrote(NAME, "done")
    cluster.patch("Node", node, {"spec": {"unschedulable": False}}, namespace="")
    cluster.wait(lambda: cluster.ended(NAME) == "Complete", "the job has ended")
    assert job.user.get(NAME).state == "SUCCEEDED"
    assert job.user.lines(NAME)[-1] == "done"


@pytest.mark.parametrize("minor", [24, 31])
def test_a_job_of_fixed_size_survives_its_pods(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minor: int
) -> None:
    cluster = make_cluster(minor=minor)
    user = User(cluster, tmp_path, monkeypatch)
    job = Lasting(user, nodes=2, max_restarts=1, silence="60s", placement="spread")
    job.runs(2)

    def delete(index: int) -> None:
        cluster.delete("Pod", job.name(index))

    def evict(index: int) -> None:
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": job.name(index)}}
        path = f"/api/v1/namespaces/default/pods/{job.name(index)}/eviction"
        assert Http(cluster)("POST", path, body)[0] == 201

    def preempt(index: int) -> None:
        cluster.preempt(job.name(index))

    def oom(index: int) -> None:
        cluster.oom(job.name(index))

    deletions = 1 if minor == 24 else 3  # more than --max-restarts
    faults = [(delete, 1, 0)] * deletions
    faults += [(evict, 0, 0)] if minor == 24 else [(preempt, 0, 0), (oom, 0, 1)]
    for fault, index, restarts in faults:
        fault(index)
        job.runs(2)
        assert user.get(NAME).restarts == restarts
        if fault is delete:
            assert "it-1 leaves" in str(user.backend().events(NAME))
    job.ends_well()


@pytest.mark.nightly  # the cluster pauses for longer than 20 seconds
def test_a_job_of_fixed_size_outwaits_the_pauses_of_the_cluster(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the seventh lost pod on, the next one comes after 600 s: all times are a fiftieth of what they are."""
    user = User(make_cluster(minor=31, pace=1 / 50), tmp_path, monkeypatch)
    job = Lasting(user, nodes=2, max_restarts=1, join_timeout=f"{1200 / 50}s")
    job.runs(2)
    for _ in range(7):
        user.cluster.delete("Pod", job.name(1))
        job.runs(2)
    assert user.get(NAME).restarts == 0
    job.ends_well()


@pytest.mark.torch
@pytest.mark.parametrize("minor", [24, 31])
def test_every_sample_is_trained_on_once_although_a_pod_is_lost(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minor: int
) -> None:
    """Checkpoints are on a volume, or pods copy them from each other."""
    pytest.importorskip("torch")
    user = User(make_cluster(minor=minor), tmp_path, monkeypatch)
    where = "/end/checkpoints" if minor == 24 else None
    given = {"args": ["/end/now", "1000000"], "checkpoint_dir": where}
    job = Lasting(user, TRAIN, nodes=2, max_restarts=2, silence="60s", placement="spread", **given)
    job.runs(2)
    if minor == 24:
        user.cluster.oom(job.name(0))
    else:
        user.cluster.delete("Pod", job.name(1))
    job.runs(2)
    job.ends_well()
    found = re.findall(r"^seen (\d+) (\d+)$", "\n".join(user.lines(NAME)), re.M)
    assert found and len(set(found[-1])) == 1 and int(found[-1][0]) > 0, found


def test_a_job_began_when_its_first_pod_did(user: User) -> None:
    """Pods are drained one after the other: the last ones have it from the others."""
    job = Lasting(user, nodes=2, max_restarts=1, silence="60s", placement="spread")
    job.runs(2)
    now = time.time()
    for index in (0, 1):
        user.cluster.delete("Pod", job.name(index))
        job.runs(2)
        eventually(lambda: len(user.cluster.all("Pod")) == 2, "the old pod is gone")
    assert (user.get(NAME).started or now) < now
    job.ends_well()
    assert (user.get(NAME).started or now) < now


@pytest.mark.parametrize("how", ["stop", "suspend"])
def test_a_job_that_is_resumed_goes_on_counting(user: User, how: str) -> None:
    """What is stopped notes when it began; and the volume of a job has it, and its restarts."""
    fails = 'import os\nif not os.path.exists("/end/failed"): open("/end/failed", "w").close(); raise SystemExit(3)'
    kept = {"log_dir": "/end/logs"} if how == "suspend" else {}
    job = Lasting(user, f"{fails}\n{textwrap.dedent(STAY)}", nodes=2, max_restarts=3, **kept)
    job.runs(2)
    before, now = user.get(NAME).restarts, time.time()
    if how == "stop":
        user.backend().stop([NAME])
    else:
        user.cluster.patch("Job", NAME, {"spec": {"suspend": True}})
    eventually(lambda: not user.cluster.all("Pod"), "the pods are gone")
    user.cluster.patch("Job", NAME, {"spec": {"suspend": False}})
    job.runs(2)
    after = user.get(NAME)
    assert (after.started or now) < now
    assert before == 1 and (how == "stop" or after.restarts == 1)
    job.ends_well()


def test_a_pod_that_is_killed_and_has_no_others_counts_as_a_restart(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = User(make_cluster(minor=31), tmp_path, monkeypatch)
    job = Lasting(user, max_restarts=1)
    job.runs(1)
    begun = user.get(NAME).started
    user.cluster.oom(job.name(0))
    job.runs(1)
    found = user.get(NAME)
    assert (found.started, found.restarts) == (begun, 1)
    job.ends_well()
    found = user.get(NAME)
    assert (found.started, found.restarts) == (begun, 1)
