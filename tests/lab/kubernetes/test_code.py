"""Code that is too large for ConfigMaps, and jobs that end because their client was killed."""

from __future__ import annotations

import hashlib
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
from paceline.backends.kubernetes.start import streaming
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fake_kubernetes.cluster import Cluster

    from .user import User

SCRIPT = """
    import hashlib, pathlib
    print(hashlib.sha256(pathlib.Path("table").read_bytes()).hexdigest(), flush=True)
"""


def test_large_code_is_sent_into_one_pod_and_the_others_get_it_there(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "MOST_CODE", 100_000)
    Path("table").write_bytes(random.Random(1).randbytes(3_000_000))
    sent: list[str] = []
    send_to = streaming._send_to

    def count(cluster: object, pod: object, *rest: object) -> None:
        send_to(cluster, pod, *rest)  # type: ignore[arg-type]
        sent.append(pod.name)  # type: ignore[attr-defined]

    monkeypatch.setattr(streaming, "_send_to", count)
    user.submit(SCRIPT, name="it", nodes=2, placement="spread")
    assert len(sent) == 1
    job = user.ended("it")
    assert job.state == "SUCCEEDED", job.error
    digest = hashlib.sha256(Path("table").read_bytes()).hexdigest()
    assert [line for line in user.lines("it", None) if "waiting for the job's code" not in line] == [digest] * 2
    found = user.cluster.all("Job")[0]["spec"]
    assert "activeDeadlineSeconds" not in found and "ttlSecondsAfterFinished" not in found
    with pytest.raises(UserError, match=r"^the code of job it went with its pods; submit the job again$"):
        user.submit(SCRIPT, name="again", resume_from="it")
    user.backend().delete(["it"])
    user.nothing_left("it")


def test_who_may_not_send_code_into_pods_is_refused(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MOST_CODE", 1000)
    Path("table").write_bytes(random.Random(1).randbytes(3000))
    every = ["get", "list", "watch", "create", "patch", "delete"]
    kinds = ["jobs", "pods", "services", "configmaps", "secrets"]
    user.cluster.user("limited", rules=[
        {"apiGroups": ["", "batch"], "resources": kinds, "verbs": every},
        {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["get"]},
    ])  # fmt: skip
    user.context = "limited"
    with pytest.raises(
        UserError, match=r"^the code has 0\.0 MiB .* resources: \[pods/exec\], verbs: \[create\]; or"
    ) as caught:
        user.submit(SCRIPT, name="it")
    assert "\n" not in str(caught.value)
    assert user.cluster.all("Job") == []


CLIENT = """
import sys
from paceline.backends.kubernetes import holding, lease, objects
lease.SECONDS, lease._EVERY, holding.LEFTOVER, objects.MOST_CODE = 120, 0.5, 1, int(sys.argv.pop(1))
from paceline.cli.main import main
main()
"""


@pytest.fixture
def client(cluster: Cluster, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts the command line, which moves deadlines on often."""
    env = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "PACELINE_HOME": str(tmp_path / "home")}
    (tmp_path / "work").mkdir(exist_ok=True)

    def start(most: int, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(most), *words], cwd=tmp_path / "work", env=env, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    return start


def test_a_job_in_the_foreground_ends_when_its_client_is_killed(
    user: User, client: Callable[..., subprocess.Popen[str]]
) -> None:
    Path("long.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    with client(1 << 20, "run", "--on", "kubernetes", "--image", "usual", "--name", "it", "long.py") as running:
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
    assert job.error == "paceline run, which it belongs to, was killed, or did not reach the cluster for 3 minutes"


def test_nothing_is_left_of_a_submit_that_is_killed_while_it_sends_code(
    user: User, client: Callable[..., subprocess.Popen[str]]
) -> None:
    Path("long.py").write_text("import time\ntime.sleep(600)\n")
    with client(10, "submit", "--on", "kubernetes", "--image", "missing", "--name", "it", "long.py") as running:
        try:
            eventually(lambda: user.cluster.all("Pod"), "it has a pod, which never runs")
            eventually(lambda: re.search("cannot be pulled", user.get("it").waiting or ""), "get says why it waits")
            assert running.poll() is None
        finally:
            running.kill()
    user.deadlines_pass()
    user.nothing_left("it")
