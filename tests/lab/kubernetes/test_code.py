"""Code that is too large, and jobs that end because their client was killed."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually

from paceline.backends.kubernetes.manifests import objects
from paceline.backends.packing import archive
from paceline.job.errors import UserError

from .user import User

if TYPE_CHECKING:
    from collections.abc import Callable

    from fake_kubernetes.cluster import Cluster


def test_code_that_is_too_large_is_refused(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MOST_CODE", 1 << 20)
    Path("table").write_bytes(random.Random(1).randbytes(3 << 19))
    with pytest.raises(UserError, match=r"^the code has more than 1\.0 MiB when packed, which is what pods get; name"):
        user.submit("print(1)", name="it")
    assert user.cluster.all("Job") == []


CLIENT = """
import sys
from paceline.backends.kubernetes.start import holding
holding.LEASE_SECONDS, holding._EVERY, holding.LEFTOVER = 120, 0.5, 1
from paceline.cli.main import main
main()
"""


@pytest.fixture
def client(cluster: Cluster, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts the command line, which moves deadlines on often."""
    env = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "PACELINE_HOME": str(tmp_path / "home")}
    (tmp_path / "work").mkdir(exist_ok=True)

    def start(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", CLIENT, *words], cwd=tmp_path / "work", env=env, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    return start


def test_a_job_in_the_foreground_ends_when_its_client_is_killed(
    user: User, client: Callable[..., subprocess.Popen[str]]
) -> None:
    Path("long.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    with client("run", "--on", "kubernetes", "--image", "usual", "--name", "it", "long.py") as running:
        try:
            assert running.stdout is not None
            eventually(lambda: "here" in running.stdout.readline(), "it runs")  # type: ignore[union-attr]

            def deadline() -> int:
                return int(user.cluster.all("Job")[0]["spec"].get("activeDeadlineSeconds") or 0)

            eventually(lambda: deadline() > 124, "the client moves the deadline on")
            assert user.get("it").state == "RUNNING"
        finally:
            running.kill()
    user.deadlines_pass()
    job = user.ended("it")
    assert (job.state, job.exit_code) == ("FAILED", 143)
    listed, _ = client("list").communicate()
    assert re.search(r"^it +kubernetes +FAILED ", listed, re.M), f"also where no target is in the settings: {listed}"
    assert job.error == "paceline run, which it belongs to, was killed, or did not reach the cluster for 3 minutes"


def test_what_a_submit_asks_and_sends(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question once, nothing that another answer says, and of the library little more than its zip has."""
    user = User(make_cluster(operators=("training-operator", "trainer", "jobset")), tmp_path, monkeypatch)
    asked = user.cluster.server.requests
    asked.clear()
    user.submit("pass", name="it")
    sent = [it for it in asked if it.startswith("POST /api/v1/namespaces/default/configmaps")]
    others = [it for it in asked if it not in sent]
    assert len(set(others)) == len(others)
    groups, kinds = 3, 6  # of operators
    assert len(others) == groups + kinds + len(["version", "groups", "trial", "Job", "Service", "confirmation"])
    pieces = [it for found in user.cluster.all("ConfigMap") for it in found.get("binaryData", {}).items()]
    size = sum(len(text) for name, text in pieces if name.startswith("archive-"))
    assert 0 < size < 1.1 * len(archive().data), "base64 adds a third"
