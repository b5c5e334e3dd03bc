"""A port of this machine that leads to a port in a pod: `kubectl port-forward`, which is started again when it ends."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from paceline.backends.kubernetes.api.credentials import kubectl
from paceline.backends.kubernetes.api.rights import missing
from paceline.backends.kubernetes.look.pods import seen
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.backends.kubernetes.options import Options

_HOST = "127.0.0.1"
_READY = "Forwarding from"
_USUAL = (_READY, "Handling connection")
_PAUSE = 0.5


class Forward:
    """Leads connections to a port in a pod, until it is closed."""

    def __init__(
        self,
        cluster: Cluster,
        options: Options,
        pod: str,
        url: str,
        *,
        warn: Callable[[str], None],
        port: int | None = None,
    ) -> None:
        """Take a port here: the one that is wanted, or else that of the pod if it is free."""
        self._cluster, self._pod = cluster, pod
        self._warn = warn  # gets a line about each connection that could not be made
        if lacking := missing(cluster, "", "pods/portforward", ("create", "get")):
            raise UserError(
                f"you may not reach ports of pods: a Role in namespace {cluster.namespace} has to grant apiGroups: "
                f"[''], resources: [pods/portforward], verbs: [{', '.join(lacking)}]"
            )
        there = urlsplit(url)
        here = _free(port or there.port or 80)
        if port not in (None, here):
            raise UserError(f"--port {port} is taken on this machine; give another, or leave it out")
        words = ("port-forward", "--address", _HOST, f"pod/{pod}", f"{here}:{there.port}")
        self._command = kubectl("tensorboard", options, cluster.namespace, *words)
        self.url = f"http://{_HOST}:{here}{there.path}"  # the address here
        self._process = self._started()

    def __enter__(self) -> Forward:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def serve(self) -> None:
        """Lead connections there, until the pod ends."""
        while True:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if not line.startswith(_USUAL):
                    self._warn(f"pod {self._pod}: {line.strip()}")
            self._process.wait()
            time.sleep(_PAUSE)
            with contextlib.suppress(UserError):  # the server does not answer now
                pod = seen(self._cluster.get(self._cluster.path("v1", "pods", self._pod)))
                if pod.is_over:
                    self._warn(f"pod {self._pod} has ended")
                    return
            self._process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        """kubectl, once it listens or has ended."""
        process = subprocess.Popen(
            self._command.command, env=self._command.env, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(_READY):
                break
            self._warn(f"pod {self._pod}: {line.strip()}")
        return process


def _free(port: int) -> int:
    """A port of this machine: this one, if it is free."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((_HOST, port))
        except OSError:
            one.bind((_HOST, 0))
        return int(one.getsockname()[1])
