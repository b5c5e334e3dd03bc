"""Logs that are on a volume when the pods are gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually

from paceline.backends.base import Incomplete, LogQuery
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
    user.submit(SCRIPT, name="it", nodes=2, data=["work:/saved"], log_dir="/saved/logs", placement="spread", grace="1s")
    job = user.ended("it")
    assert job.state == "FAILED" and job.logs.startswith("kept on volume work, in /saved/logs/it-")
    ended = {pod.index: pod for pod in user.backend()._find("it").pods if pod.is_over}
    assert ended[1].report["failure"]["rank"] == 1, (
        "the culprit's pod has ended before its cluster deletes those that run"
    )
    files = sorted(claim.glob("logs/it-*/node-*.log"))
    assert [path.name[:7] for path in files] == ["node-0-", "node-1-"]
    for pod in user.cluster.all("Pod"):
        user.cluster.delete("Pod", pod["metadata"]["name"])
    eventually(lambda: not user.cluster.all("Pod"), "the pods are gone")
    user.cluster.restart_at("POST", "/pods", after=True)  # the pod that reads them is made, and the answer is lost
    assert sorted(user.lines("it", None)) == ["here 0", "here 1"]
    user.cluster.wait_for_server()
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


LONG = """
    import os, time
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        print(*(f"line {number}" for number in range(500)), sep="\\n", flush=True)
        while not os.path.exists("/saved/go"):
            time.sleep(0.05)
        raise SystemExit(3)
    print("again", flush=True)
    while "WAITS" in os.environ:
        time.sleep(0.1)
"""


def test_logs_that_lost_their_beginning(user: User) -> None:
    """A node keeps only the end of a long log."""
    claim = user.cluster.claim("work")
    given = {"max_restarts": 1, "data": ["work:/saved"]}
    user.submit(LONG, name="kept", log_dir="/saved/logs", **given)
    user.submit(LONG, name="cut", env={"WAITS": ""}, **given)
    for name in ("kept", "cut"):
        user.wrote(name, "line 499")
    for pod in user.cluster.all("Pod"):
        user.cluster.rotate_log(pod["metadata"]["name"])
    (claim / "go").touch()
    every = [f"line {number}" for number in range(500)]
    assert user.ended("kept").state == "SUCCEEDED" and user.lines("kept") == ["again"]
    assert user.lines("kept", attempt=0) == every and user.lines("kept", attempt=0, tail=2) == every[-2:]
    user.wrote("cut", "again")
    assert user.lines("cut") == ["again"], "all of this attempt is there"
    for query in (LogQuery(attempt=0), LogQuery(attempt=0, tail=500), LogQuery(attempt=0, since=1.0)):
        with pytest.raises(Incomplete, match=r"^the log of pod cut-0-\w+ begins in the middle: .*; --log-dir on a vol"):
            assert list(user.backend().logs("cut", query)) == []
    for name in ("kept", "cut"):  # the agent that runs is asked
        assert {"started", "restarting"} <= {event["event"] for event in user.backend().events(name)}
