"""What goes over a connection from a client, such as ssh's: words and bytes on stdin, answers on stdout.

An answer is an object on a line; with `bytes`, so many follow it. `{"error": …}` says why something cannot be done.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from typing import Any

from paceline.node.errors import Refused


def send(answer: dict[str, Any]) -> None:
    """Send an answer, and behind it the bytes that it has as `data`."""
    data = answer.pop("data", b"")
    line = json.dumps({**answer, "bytes": len(data)} if data else answer)
    sys.stdout.buffer.write(line.encode() + b"\n" + data)
    sys.stdout.buffer.flush()


def next_word() -> str:
    """The next line of stdin, "" at its end."""
    return sys.stdin.buffer.readline().decode().strip()


class Bytes:
    """So many bytes of stdin, and never fewer."""

    def __init__(self, count: int) -> None:
        self._left = count

    def read(self, size: int) -> bytes:
        """The next bytes, b"" after the last one.

        Raises:
            Refused: there are fewer: the client is gone.
        """
        data = sys.stdin.buffer.read(min(size, self._left))
        self._left -= len(data)
        if not data and self._left:
            raise Refused("the code did not arrive; submit the job anew")
        return data

    def skip(self) -> None:
        """Read all that is left.

        Raises:
            Refused: see `read`.
        """
        while self.read(1 << 16):
            pass


def end_with_stdin() -> None:
    """From now on this process ends when whoever asked is gone: it may wait for what never comes."""
    threading.Thread(target=_end_with_stdin, daemon=True).start()


def _end_with_stdin() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(0)
