"""What NCCL says of a job that hangs: from version 2.24 on, its RAS service listens on each machine of a job.

https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html
"""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING, Callable

if TYPE_CHECKING:
    from collections.abc import Collection

    from paceline.node.eventloop.loop import Loop

PORT = 28028
_SECONDS = 3.0  # that it has to answer; it gives the other machines two
_CONNECT_SECONDS = 0.2
_MOST = 6  # lines
_PROCESS = re.compile(r"\b[Pp]rocess (\d+)\b")


class Ras:
    """Asks the service of this machine, without waiting; `then` is called once, with its lines, if it has any."""

    def __init__(self, loop: Loop, pids: Collection[int], then: Callable[[list[str]], None], port: int = PORT) -> None:
        self._loop, self._pids, self._then, self._data = loop, pids, then, b""
        try:
            self._socket = socket.create_connection(("127.0.0.1", port), _CONNECT_SECONDS)
            self._socket.sendall(b"TIMEOUT 2\nSTATUS\n")
        except OSError:
            then([])
            return
        self._socket.setblocking(False)
        loop.watch(self._socket, self._receive)
        loop.after(_SECONDS, self._end)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        self._data += data
        if not data:
            self._end()

    def _end(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._loop.forget(self._socket)
        self._socket.close()
        self._then(problems(self._data.decode(errors="replace"), self._pids))


def problems(status: str, pids: Collection[int]) -> list[str]:
    """The lines of its errors and warnings, if they name one of these processes; the service may be another job's."""
    _, _, found = status.partition("\nErrors\n")
    lines = [line.strip() for line in found.splitlines() if line.strip(" =") and line != "Warnings"]
    return lines[:_MOST] if any(int(pid) in pids for pid in _PROCESS.findall(found)) else []
