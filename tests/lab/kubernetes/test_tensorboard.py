"""`paceline tensorboard` leads a port of this machine into the pod."""

from __future__ import annotations

import signal
import socket
import urllib.error
import urllib.request
from typing import TYPE_CHECKING
from urllib.parse import urljoin

import pytest
from tests.conftest import GENEROUS, eventually

from paceline.backends.kubernetes.change.forwarding import Forward
from paceline.backends.kubernetes.options import Options
from paceline.job.errors import UserError

from .board import with_board

if TYPE_CHECKING:
    from fake_kubernetes.cluster import Cluster
    from tests.conftest import Paceline

    from .user import User

WAIT = """
    import pathlib, time
    print("here", flush=True)
    while not pathlib.Path("/flags/end").exists():
        time.sleep(0.1)
"""


def read(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return bytes(answer.read())
    except (OSError, urllib.error.URLError):
        return b""


def test_its_address_here_leads_into_the_pod_until_ctrl_c(paceline: Paceline, cluster: Cluster, kubectl: None) -> None:
    paceline.env["KUBECONFIG"] = str(cluster.kubeconfig)
    flags = cluster.claim("flags")
    cluster.images["board"] = with_board()
    submit = ("submit", "--on", "kubernetes", "--image", "board", "--data", "flags:/flags", "--tensorboard")
    assert paceline(*submit, "--name", "it", paceline.script(WAIT)).returncode == 0
    eventually(lambda: any('"tensorboard"' in line for line in cluster.written("it")), "its TensorBoard runs")
    assert "http" in paceline("get", "it").stdout
    running = paceline.start("tensorboard", "it")
    assert running.stdout is not None
    url = running.stdout.readline().strip()
    eventually(lambda: b"TensorBoard" in read(url), "it answers")
    assert len(read(f"{url}index.js")) > 3 << 20, "what is large comes whole"
    assert read(urljoin(url, "/index.js")) == b"", "nobody without its token gets an answer"
    cluster.restart_server()
    eventually(lambda: b"TensorBoard" in read(url), "it answers when the server is back")
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=GENEROUS)
    assert running.returncode == 0, (out, err)
    assert "Traceback" not in err
    (flags / "end").touch()
    eventually(lambda: cluster.ended("it"), "the job ends")
    refused = paceline("tensorboard", "it", "--logdir", "/flags")
    assert refused.returncode == 2 and "another job with its volume (--data), --tensorboard" in refused.stderr


def test_who_may_not_reach_ports_of_pods(user: User) -> None:
    user.cluster.user("limited", rules=[])
    with pytest.raises(
        UserError, match=r"^you may not reach ports of pods: .* \[pods/portforward\], verbs: \[create, get\]$"
    ):
        Forward(user.backend(context="limited")._cluster, Options(), "pod", "http://127.0.0.1:1/", warn=print)


def test_without_kubectl_a_line_says_so(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(UserError, match=r"^paceline tensorboard needs kubectl on Kubernetes, which is not on PATH"):
        Forward(user.backend()._cluster, Options(), "pod", "http://127.0.0.1:1/", warn=print)


def test_the_port_that_is_wanted_is_taken_or_refused(user: User) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            UserError, match=rf"^--port {port} is taken on this machine; give another, or leave it out$"
        ):
            Forward(user.backend()._cluster, Options(), "pod", "http://127.0.0.1:1/", warn=print, port=port)
