"""The protocol of a connection from a client, such as one over ssh: orders and bytes on stdin, answers on stdout.

An answer is a JSON object in a line; if it has `bytes`, that many bytes follow. `{"error": …}` says why something
cannot be done.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
from typing import TYPE_CHECKING, Any, cast

from paceline.node.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Mapping
    from io import BufferedReader


def encoded(answer: Mapping[str, Any]) -> bytes:
    """An answer, followed by the bytes that it has as `data`."""
    line = {key: value for key, value in answer.items() if key != "data"}
    data: bytes = answer.get("data", b"")
    return json.dumps({**line, "bytes": len(data)} if data else line).encode() + b"\n" + data


def send(answer: Mapping[str, Any]) -> None:
    """Send an answer."""
    sys.stdout.buffer.write(encoded(answer))
    sys.stdout.buffer.flush()


def next_order() -> str:
    """The next line of stdin, "" at its end."""
    return sys.stdin.buffer.readline().decode().strip()


def client_is_gone() -> bool:
    """Whether stdin has ended, which nothing else follows on: the client was interrupted, or the connection broke."""
    stdin = cast("BufferedReader", sys.stdin.buffer)
    return bool(select.select([stdin], [], [], 0)[0]) and not stdin.peek(1)


class Bytes:
    """Exactly `count` bytes of stdin; `what` they are, for messages."""

    def __init__(self, count: int, what: str = "the code") -> None:
        self._remaining, self._what = count, what

    def read(self, size: int) -> bytes:
        """The next bytes, b"" after the last one."""
        data = sys.stdin.buffer.read(min(size, self._remaining))
        self._remaining -= len(data)
        if not data and self._remaining:
            raise Refused(f"{self._what} did not arrive; submit the job again")
        return data

    def skip(self) -> None:
        """Read all that is left."""
        while self.read(1 << 16):
            pass


def end_with_stdin() -> None:
    """From now on, this process ends when the client is gone: it may be waiting for something that never comes."""
    threading.Thread(target=_end_with_stdin, daemon=True).start()


def _end_with_stdin() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(0)
