"""A port of this machine that leads to a port in a pod, through the API server: each connection in a WebSocket.

Source: https://github.com/kubernetes/kubernetes/blob/v1.24.0/pkg/kubelet/cri/streaming/portforward/websocket.go
(channels of `v4.channel.k8s.io`: of each port one for data and one for errors, each beginning with the port).
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

from paceline.backends.kubernetes.api.rights import missing
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from httpx2.websockets import WebSocketSession

    from paceline.backends.kubernetes.api.client import Cluster

_PROTOCOLS = ["v4.channel.k8s.io"]
_DATA, _ERROR = 0, 1  # channels
_PORT_BYTES = 2  # at the beginning of each channel
_BLOCK = 1 << 15
_MOST = 1 << 20  # bytes of a message
_HOST = "127.0.0.1"


class Forward:
    """Leads connections to a port in a pod, until it is closed. A connection that breaks ends alone.

    Attributes:
        port: of this machine.
    """

    def __init__(
        self,
        cluster: Cluster,
        pod: str,
        port: int,
        warn: Callable[[str], None],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """Take a port here: that of the pod, if it is free.

        Args:
            cluster: where the pod is.
            pod: its name.
            port: in the pod.
            warn: gets a line about a connection that could not be made.
            end: called when it is closed, or cannot be made.

        Raises:
            UserError: this user may not do that.
        """
        lacking = missing(cluster, "", "pods/portforward", ("create", "get"))
        if lacking:
            end()
            raise UserError(
                f"you may not reach ports of pods: a Role in namespace {cluster.namespace} has to grant apiGroups: "
                f"[''], resources: [pods/portforward], verbs: [{', '.join(lacking)}]"
            )
        self._cluster, self._pod, self._inside, self._warn, self._end = cluster, pod, port, warn, end
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((_HOST, port))
        except OSError:
            self._listener.bind((_HOST, 0))
        self._listener.listen(64)
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Forward:
        """Nothing more."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self._listener.close()
        self._end()

    @property
    def url(self) -> str:
        """The address here."""
        return f"http://{_HOST}:{self.port}/"

    def serve(self) -> None:
        """Accept connections, for ever."""
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._lead, args=(connection,), daemon=True).start()

    def _lead(self, local: socket.socket) -> None:
        """Lead one connection, until one side ends it."""
        import httpx2
        from httpx2.websockets import HTTPXWSException, WebSocketDisconnect

        url = self._cluster.path("v1", "pods", self._pod, "portforward")
        http = self._cluster.access.http
        try:
            with (
                local,
                http.websocket(
                    url, subprotocols=_PROTOCOLS, params={"ports": self._inside}, max_message_size_bytes=_MOST
                ) as remote,
            ):
                threading.Thread(target=_send, args=(local, remote), daemon=True).start()
                try:
                    self._receive(local, remote)
                finally:
                    with contextlib.suppress(OSError):
                        local.shutdown(socket.SHUT_RDWR)
        except WebSocketDisconnect:
            return
        except (httpx2.HTTPError, HTTPXWSException, OSError) as error:
            self._warn(f"pod {self._pod} cannot be reached: {error or type(error).__name__}")

    def _receive(self, local: socket.socket, remote: WebSocketSession) -> None:
        left = {_DATA: _PORT_BYTES, _ERROR: _PORT_BYTES}
        while True:
            data = remote.receive_bytes()
            channel, data = data[0], data[1:]
            skipped = min(len(data), left.get(channel, 0))
            if skipped:
                left[channel] -= skipped
                data = data[skipped:]
            if data and channel == _DATA:
                local.sendall(data)
            elif data and channel == _ERROR:
                self._warn(f"pod {self._pod}: {data.decode(errors='replace').strip()}")
                return


def _send(local: socket.socket, remote: WebSocketSession) -> None:
    from httpx2.websockets import HTTPXWSException

    with contextlib.suppress(OSError, HTTPXWSException):
        while data := local.recv(_BLOCK):
            remote.send_bytes(bytes([_DATA]) + data)
        remote.close()
