"""The lab itself: what a real cluster does, it does, and the real kubectl can read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .manifests import CONFIG, job, service

if TYPE_CHECKING:
    from .cluster import Cluster

pytestmark = pytest.mark.usefixtures("kubectl")


def test_a_job_runs_with_its_names_and_its_files(cluster: Cluster) -> None:
    script = "cat /config/a; hostname; echo $JOB_COMPLETION_INDEX; until getent hosts t-0.t && getent hosts t-1.t.default; do :; done"
    one = job(script, completions=2, volumes=[{"name": "c", "configMap": {"name": "c"}}], mounts={"c": "/config"})
    cluster.apply(CONFIG, service(), one)
    cluster.wait(lambda: cluster.ended("t"), "the job ends")
    status = cluster.get("Job", "t")["status"]
    assert status["succeeded"] == 2 and status["completedIndexes"] == "0-1" and status["completionTime"]
    assert [one["type"] for one in status["conditions"]] == ["Complete"]
    for index, pod in enumerate(sorted(cluster.all("Pod"), key=lambda pod: pod["metadata"]["name"])):
        assert pod["metadata"]["name"].startswith(f"t-{index}-") and pod["status"]["phase"] == "Succeeded"
        lines = cluster.kubectl("logs", pod["metadata"]["name"]).stdout.splitlines()
        assert lines[:3] == ["hello", f"t-{index}", str(index)]
        assert [line.split()[1] for line in lines[3:]] == [f"t-{i}.t.default.svc.cluster.local" for i in (0, 1)]
    cluster.kubectl("delete", "job", "t")
    cluster.wait(lambda: not list(cluster.storage.all(cluster.resource("Pod"))), "its pods are gone")
