"""Jobs that are ended at once, and jobs whose node is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from paceline.job.spec import JobSpec

from .user import Silence, User

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fake_kubernetes.cluster import Cluster

STUBBORN = """
    import signal, threading
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("here", flush=True)
    threading.Event().wait()
"""


def test_a_job_that_does_not_end_by_itself_is_ended_at_once(user: User) -> None:
    user.submit(STUBBORN, name="it", nodes=2, devices=2, grace="300s")
    user.wrote("it", "here", 2)
    job = user.get("it")
    assert (job.devices, job.allocated) == ((), 4), "which devices they have only the pods know"
    nodes = user.backend().nodes(print)
    assert ([node.devices for node in nodes], sum(node.allocated_count for node in nodes)) == ([(), ()], 4)
    assert user.backend().stop(["it"], now=True) == {}
    assert user.ended("it").state == "STOPPED"
    assert user.backend().stop(["it"]) == {}
    assert user.backend().delete(["it"]) == []
    user.nothing_left("it")
    assert [node.state for node in user.backend().nodes(print)] == ["ready", "ready"]
    user.cluster.cordon("node-1")
    assert [node.state for node in user.backend().nodes(print)] == ["cordoned", "ready"]


def test_a_node_that_is_lost_ends_a_job_of_fixed_size(user: User) -> None:
    user.submit("import threading; print('here', flush=True); threading.Event().wait()", name="it", nodes=2,
                placement="spread", silence="60s")  # fmt: skip
    user.wrote("it", "here", 2)
    lost = user.get("it").instances[1].node.partition("/")[0]
    user.cluster.crash(lost)
    job = user.ended("it")
    assert job.state == "FAILED" and "it-1" in str(job.error), job
    assert "not ready" in {node.name: node.state for node in user.backend().nodes(print)}[lost]


@pytest.mark.parametrize("minor", [24, 31])
def test_a_job_that_is_stopped_and_resumed(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minor: int
) -> None:
    user = User(make_cluster(minor=minor), tmp_path, monkeypatch)
    user.submit("import threading; print('here', flush=True); threading.Event().wait()", name="it", ttl="600s")
    user.wrote("it", "here")
    user.backend().stop(["it"])
    job = user.ended("it")
    assert (job.state, job.exit_code, job.ttl) == ("STOPPED", 143, None), "a suspended job is kept"
    assert job.started and job.finished and job.created <= job.started <= job.finished
    conditions = user.cluster.get("Job", "it")["status"]["conditions"]  # type: ignore[index]
    assert [it["type"] for it in conditions] == ["Suspended"], "its pods do not count"
    user.cluster.patch("Job", "it", {"spec": {"suspend": False}})
    user.wrote("it", "here", 2)
    user.cluster.kill(user.get("it").instances[0].node.partition("/")[2])
    job = user.ended("it")
    assert (job.state, job.exit_code, job.ttl) == ("FAILED", 137, 600.0)


def test_a_time_limit(user: User) -> None:
    user.submit("import threading; threading.Event().wait()", name="agent", time_limit="2s")
    there = user.backend(plain=True)
    spec = JobSpec.validated({"name": "plain", "command": "sleep", "args": ["600"], "time_limit": "3s"})
    there.start(there.prepare(spec), Silence())
    assert (user.ended("agent").state, user.ended("agent").exit_code) == ("FAILED", 124)
    assert "time limit" in str(user.get("agent").error)
    job = user.ended("plain")
    assert (job.state, job.exit_code) == ("FAILED", 124) and "deadline" in str(job.error)


def test_nodes_that_do_not_come_are_named(user: User) -> None:
    user.cluster.cordon("node-2")
    apart = {"labelSelector": {"matchLabels": {"job-name": "it"}}, "topologyKey": "kubernetes.io/hostname"}
    template = {"spec": {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}}}
    user.submit(STUBBORN, name="it", nodes=2, join_timeout="3s", pod_template=template)
    job = user.ended("it")
    assert job.state == "FAILED" and "it-1 of 2 nodes did not come within 3 s" in str(job.error), job
