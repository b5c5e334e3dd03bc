"""Pods that are lost, and others in their place: every sample is trained on exactly once."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import pytest
from fake_kubernetes.client import Http
from tests.conftest import eventually

from paceline.backends.base import LogQuery
from paceline.job.errors import UserError

from .user import User

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fake_kubernetes.cluster import Cluster

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

TRAIN = """
    import os, time, torch
    from torch.utils.data import TensorDataset
    import paceline

    class Seen:  # how often each sample was trained on
        def __init__(self, count):
            self.counts = torch.zeros(count)
        def state_dict(self):
            return {"counts": self.counts}
        def load_state_dict(self, state):
            self.counts = state["counts"]

    samples = 400
    run = paceline.init(seed=1, checkpoint_every=5, progress=False)
    model, optimizer = run.setup(model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters(), 0.01))
    seen = Seen(samples)
    run.register(seen=seen)
    train = run.dataloader(TensorDataset(torch.arange(float(samples))), global_batch_size=12, shuffle=True)
    for epoch in run.epochs(1000000):
        for (numbers,) in train:
            mine = torch.zeros(samples)
            mine[numbers[: train.samples].long()] = 1
            run.backward(model(numbers[:, None] / samples).mean())
            optimizer.step()
            optimizer.zero_grad()
            seen.counts += run.all_reduce(mine)
            if run.rank == 0:
                print("step", run.step, "with", run.world_size, "in", os.environ["HOSTNAME"], flush=True)
            time.sleep(0.03)
        if run.all_reduce(torch.tensor(float(os.path.exists("/end/now")))):
            break
    if run.rank == 0:
        print("seen", int(seen.counts.min()), int(seen.counts.max()), flush=True)
"""
NAME = "it"


class Training:
    """A job that trains until it is asked to end."""

    def __init__(self, user: User, *, saves_to_volume: bool, **given: Any) -> None:
        """Begin; without a volume for checkpoints, pods copy them from each other."""
        self.user, self.cluster = user, user.cluster
        self.end = user.cluster.claim("end") / "now"
        where = "/end/checkpoints" if saves_to_volume else None
        user.submit(TRAIN, name=NAME, data=["end:/end"], checkpoint_dir=where, **given)

    def pod(self, index: int) -> dict[str, Any]:
        """The newest pod of an index that is not leaving."""
        found = [
            pod
            for pod in self.cluster.all("Pod")
            if pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] == str(index)
            and not pod["metadata"].get("deletionTimestamp")
            and pod["status"].get("phase") not in ("Failed", "Succeeded")
        ]
        return found[-1] if found else {}

    def name(self, index: int) -> str:
        """Its name, "" if there is none now."""
        return str((self.pod(index).get("metadata") or {}).get("name", ""))

    def steps(self) -> tuple[int, list[int]]:
        """The last attempt, and the world size of each step that it has done."""
        lines = list(self.user.backend().logs(NAME, LogQuery()))
        found = [re.match(r"step \d+ with (\d+)", line.text.decode()) for line in lines]
        return max((line.attempt for line in lines), default=-1), [int(match[1]) for match in found if match]

    def trains(self, world: int, after: int = -1) -> int:
        """Wait until it trains with so many ranks, in an attempt after this one; returns which."""
        attempt = -1

        def is_so() -> bool:
            nonlocal attempt
            attempt, steps = self.steps()
            return attempt > after and len(steps) > 3 and steps[-1] == world

        self.eventually(is_so, f"{world} ranks train after attempt {after}")
        return attempt

    def has_another_pod(self, index: int, before: str) -> None:
        """Wait until an index has another pod than this one."""
        self.eventually(lambda: self.name(index) not in ("", before), f"another pod than {before}")

    def eventually(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until something has happened while the job goes on; says all that is known if it has not."""

        def is_so() -> bool:
            assert not self.cluster.ended(NAME), "the job has ended"
            return condition()

        try:
            eventually(is_so, what)
        except AssertionError as error:
            pods = "\n".join(f"{pod['metadata']}: {pod['status']}" for pod in self.cluster.all("Pod"))
            raise AssertionError(f"{error}\n{self.user.get(NAME)}\n{self.logs()}\n{pods}") from None

    def logs(self) -> str:
        return "\n".join(str(event) for event in self.user.backend().events(NAME))

    def ends_well(self) -> None:
        self.end.touch()
        job = self.user.ended(NAME)
        assert job.state == "SUCCEEDED", f"{job}\n{self.logs()}"
        found = re.findall(r"^seen (\d+) (\d+)$", "\n".join(self.user.lines(NAME)), re.M)
        assert found and len(set(found[-1])) == 1 and int(found[-1][0]) > 0, found


def test_logs_end_with_a_job_that_has_lost_a_node(user: User) -> None:
    end = user.cluster.claim("end") / "now"
    script = """
        import os, time
        print("here", flush=True)
        while not os.path.exists("/end/now"):
            time.sleep(0.05)
        print("done", flush=True)
    """
    user.submit(script, name=NAME, nodes=2, max_restarts=1, silence=10, placement="spread", data=["end:/end"])
    eventually(lambda: user.lines(NAME, None).count("here") == 2, "both write")
    node = user.get(NAME).instances[0].node.partition("/")[0]
    user.cluster.power_off(node)
    user.cluster.expire(node)
    eventually(lambda: user.lines(NAME, None, attempt=1).count("here") == 2, "they write again")
    end.touch()
    assert user.ended(NAME).state == "SUCCEEDED"
    assert user.lines(NAME, (1,), follow=True)[-1] == "done"


@pytest.mark.parametrize("minor", [24, 31])
def test_a_job_of_min_to_max_pods(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minor: int
) -> None:
    cluster = make_cluster(minor=minor, capacity={"nvidia.com/gpu": "1"})
    user = User(cluster, tmp_path, monkeypatch)
    job = Training(user, saves_to_volume=minor == 24, nodes="1:3", devices=1, silence=20)
    attempt = job.trains(2)
    found = user.get(NAME)
    assert (found.nodes, found.ranks, found.state) == (2, 2, "RUNNING")
    assert "no node has enough nvidia.com/gpu free" in str(found.waiting)
    if minor == 24:
        (left,) = user.backend().scalein(NAME, 2)[:1]
        attempt = job.trains(1, attempt)
        with pytest.raises(UserError, match="needs 1 pods, and 0 would be left"):
            user.backend().scalein(NAME, 1)
        assert left in user.backend().scaleout(NAME, None)
        attempt = job.trains(2, attempt)
        cluster.delete("Pod", job.name(0))
        job.trains(2, attempt)
    job.ends_well()


@pytest.mark.parametrize("minor", [24, 31])
def test_a_job_of_fixed_size_survives_its_pods(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minor: int
) -> None:
    cluster = make_cluster(minor=minor)
    user = User(cluster, tmp_path, monkeypatch)
    job = Training(
        user, saves_to_volume=minor == 24, nodes=2, max_restarts=2, silence=20, placement="spread"
    )  # fmt: skip
    attempt = job.trains(2)
    http = Http(cluster)

    def delete(index: int) -> None:
        cluster.delete("Pod", job.name(index))

    def evict(index: int) -> None:
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": job.name(index)}}
        assert http("POST", f"/api/v1/namespaces/default/pods/{job.name(index)}/eviction", body)[0] == 201

    def preempt(index: int) -> None:
        cluster.preempt(job.name(index))

    def lose_node(index: int) -> None:
        node = job.pod(index)["spec"]["nodeName"]
        cluster.power_off(node)
        cluster.expire(node)

    def oom(index: int) -> None:
        cluster.oom(job.name(index))

    taken, lost = (evict, lose_node) if minor == 24 else (preempt, oom)
    faults = [(delete, 1, 0), (taken, 0, 0), (lost, 0, 1)]
    for fault, index, restarts in faults:
        before, began = job.name(index), time.monotonic()
        fault(index)
        job.has_another_pod(index, before)
        attempt = job.trains(2, attempt)
        print(f"{fault.__name__} of pod {index}: {time.monotonic() - began:.1f} s")
        assert job.user.get(NAME).restarts == restarts
        if fault is delete:
            assert "it-1 leaves" in job.logs()
    job.ends_well()
