"""Looking again and again: one list and one watch per kind, over restarts of the server and versions that are gone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.conftest import GENEROUS, eventually

if TYPE_CHECKING:
    import pytest
    from fake_kubernetes.cluster import Cluster
    from tests.conftest import Paceline

    from .user import User

SCRIPT = """
    import pathlib, time
    while not pathlib.Path("/flags/{}").exists():
        time.sleep(0.05)
"""


def test_who_looks_again_and_again_asks_once(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = user.cluster.claim("flags")
    there = user.backend()
    there.look_repeatedly()
    assert there.describe().jobs == []
    before = there._cluster.calls

    def state(name: str) -> str | None:
        return {job.name: job.state for job in there.describe().jobs}.get(name)

    user.submit(SCRIPT.format("one"), name="one", data=["flags:/flags"])
    eventually(lambda: state("one") == "RUNNING", "the job is seen")
    assert there._cluster.calls - before <= 3, "pods are listed and watched, jobs are watched"
    user.cluster.restart_server()
    user.submit(SCRIPT.format("two"), name="two", data=["flags:/flags"])
    eventually(lambda: state("two") == "RUNNING", "it goes on after a restart")
    user.cluster.expire_watches()
    (flags / "one").touch()
    eventually(lambda: state("one") == "SUCCEEDED", "it goes on when versions are gone")
    user.backend().delete(["one"])
    eventually(lambda: state("one") is None, "it is gone")
    assert there._cluster.calls - before < 60
    monkeypatch.setenv("PACELINE_LOOK_TIMEOUT", "1s")  # so long it waits for a server that is down
    user.cluster.stop_server()
    eventually(lambda: there.describe().warnings, "it says that the server does not answer")
    (warning,) = there.describe().warnings
    assert "does not answer" in warning and warning.endswith("; what is shown is as it was before")
    assert state("two") == "RUNNING"
    user.cluster.start_server()
    eventually(lambda: not there.describe().warnings, "the server is back")


def test_who_may_not_watch_lists(user: User) -> None:
    flags = user.cluster.claim("flags")
    user.cluster.user("limited", rules=[
        {"apiGroups": ["", "batch"], "resources": ["jobs", "pods"], "verbs": ["get", "list"]},
    ])  # fmt: skip
    there = user.backend(context="limited")
    there.look_repeatedly()
    assert there.describe().jobs == []
    user.submit(SCRIPT.format("one"), name="one", data=["flags:/flags"])
    eventually(lambda: [job.state for job in there.describe().jobs] == ["RUNNING"], "it is seen")
    (flags / "one").touch()


def test_get_and_list_until_the_job_has_ended(paceline: Paceline, cluster: Cluster) -> None:
    paceline.env["KUBECONFIG"] = str(cluster.kubeconfig)
    flags = cluster.claim("flags")
    script = paceline.script(SCRIPT.format("one"))
    submit = ("submit", "--on", "kubernetes", "--image", "usual", "--data", "flags:/flags")
    assert paceline(*submit, "--name", "one", script).returncode == 0
    running = paceline.start("get", "-w", "one", "-o", "json")
    listing = paceline.start("list", "-w", "--on", "kubernetes")
    assert running.stdout is not None and listing.stdout is not None
    eventually(lambda: "RUNNING" in running.stdout.readline(), "get shows it")
    eventually(lambda: "RUNNING" in listing.stdout.readline(), "list shows it")
    Path(flags, "one").touch()
    assert '"state": "SUCCEEDED"' in running.communicate(timeout=GENEROUS)[0]
    eventually(lambda: "SUCCEEDED" in listing.stdout.readline(), "list shows its end")
    listing.terminate()
    listing.wait(GENEROUS)
