"""Logs that are on a volume when the pods are gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually

from paceline.job.errors import UserError

if TYPE_CHECKING:
    from .user import User

SCRIPT = """
    import os, time
    print("here", os.environ["RANK"], flush=True)
    if os.environ["RANK"] == "1":
        while not os.path.exists("/saved/here-0"):
            time.sleep(0.01)
        raise SystemExit(3)
    open("/saved/here-0", "w").close()
    time.sleep(600)
"""


def test_logs_of_pods_that_are_gone_are_read_from_the_volume(user: User) -> None:
    claim = user.cluster.claim("work")
    user.submit(SCRIPT, name="it", nodes=2, data=["work:/saved"], log_dir="/saved/logs", placement="spread", grace=1)
    job = user.ended("it")
    assert job.state == "FAILED" and job.logs.startswith("kept on volume work, in /saved/logs/it-")
    files = sorted(claim.glob("logs/it-*/node-*.log"))
    assert [path.name[:7] for path in files] == ["node-0-", "node-1-"]
    for pod in user.cluster.all("Pod"):
        user.cluster.delete("Pod", pod["metadata"]["name"])
    eventually(lambda: not user.cluster.all("Pod"), "the pods are gone")
    assert sorted(user.lines("it", None)) == ["here 0", "here 1"]
    assert user.lines("it", (1,), follow=True) == ["here 1"]
    assert {event["event"] for event in user.backend().events("it")} >= {"started", "finished"}
    assert user.cluster.all("Pod") == [], "the pod that has read them is gone"
    (warning,) = user.backend().describe(["it"]).warnings
    assert warning == "the pods of job it on nodes 0, 1 are gone; paceline logs reads what they wrote on volume work"

    every = ["get", "list", "watch", "create", "patch", "delete"]
    user.cluster.user("limited", rules=[
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": every},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
    ])  # fmt: skip
    user.context = "limited"
    with pytest.raises(
        UserError, match=r"^the logs of job it are in /saved/logs/it-\w{8} of volume work; reading them takes a "
    ):
        user.lines("it")


def test_where_logs_cannot_be_kept(user: User) -> None:
    with pytest.raises(
        UserError, match=r"^--log-dir /logs: pods keep logs on a volume only; mount one there with --data"
    ):
        user.submit(SCRIPT, name="it", log_dir="/logs")
    with pytest.raises(UserError, match=r"^--log-dir: without an agent \(--plain\) nothing writes there"):
        user.submit(SCRIPT, name="it", log_dir="/logs", plain=True)
    assert user.cluster.all("Job") == []
