"""How fast ranks connect while others hold connections open and send nothing."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from paceline.contract.links import Acceptor, initiate

from ..case import Case, Goal, Side
from ..lab import Lab
from ..sample import Failed, Sample

HANDSHAKES = 1000
AT_ONCE = 8  # that are under way at the same time
SILENT = 200
_LONG = 60.0  # seconds until a measurement has failed


def _measure(silent: int) -> Callable[[Lab], Sample]:
    """The time of many handshakes, both sides in this process, while some connections send nothing."""

    def measure(_: Lab) -> Sample:
        key = secrets.token_bytes(32)
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024))
            address = server.getsockname()
            for _number in range(silent):
                stack.enter_context(socket.create_connection(address, _LONG))
            acceptor = stack.enter_context(contextlib.closing(Acceptor(server, key, lambda _: True, AT_ONCE)))
            accepted = 0

            def accept() -> None:
                nonlocal accepted
                deadline = time.monotonic() + _LONG
                while accepted < HANDSHAKES and time.monotonic() < deadline:
                    for _, link in acceptor.accept(1.0):
                        accepted += 1
                        link.socket.close()

            def connect(number: int) -> None:
                initiate(socket.create_connection(address, _LONG), key, number).socket.close()

            thread = threading.Thread(target=accept)
            began = time.monotonic()
            thread.start()
            try:
                with ThreadPoolExecutor(AT_ONCE) as pool:
                    list(pool.map(connect, range(HANDSHAKES)))
            except OSError as error:
                raise Failed(f"a handshake failed: {error}") from error
            finally:
                thread.join()
            seconds = time.monotonic() - began
        if accepted != HANDSHAKES:
            raise Failed(f"{accepted} of {HANDSHAKES} handshakes were accepted")
        return Sample(seconds)

    return measure


CASES = [
    Case(
        "handshakes",
        f"{HANDSHAKES} handshakes, {AT_ONCE} at a time",
        Side(f"{SILENT} silent connections", _measure(SILENT)),
        Side("no others", _measure(0)),
        Goal(1.5),
    )
]
