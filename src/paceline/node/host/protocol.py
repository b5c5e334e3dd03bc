"""What goes over a connection from a client, such as ssh's: words and bytes on stdin, answers on stdout.

An answer is an object on a line; with `bytes`, so many follow it. `{"error": …}` says why something cannot be done.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, TypedDict

from paceline.node.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Part(TypedDict):
    """What a client asks a machine elsewhere to make: its part of a job. Most are those of `make.Order`.

    Keys:
        job: what was asked for, as a `JobSpec` is in JSON.
        data: the job's volumes: volume, path, wanted, variable.
        job_id: what its nodes have in common; None makes one up.
        hosts: the names of the nodes as the user knows them, by node rank.
        joins: the job runs elsewhere already.
        shown: which streams of which ranks somebody watches; None: nobody watches.
        terminal: variables of the terminal that shows the ranks.
        secrets: variables that are never shown.
        token: what the nodes prove to each other that they belong together.
        slots: how many slots the machine has if it has no accelerators.
        code: what is known of the job's code; None if it has none of its own.
    """

    job: dict[str, Any]
    data: Sequence[Mapping[str, Any]]
    job_id: str | None
    hosts: Sequence[str]
    joins: bool
    shown: Mapping[str, Any] | None
    terminal: Mapping[str, str]
    secrets: Mapping[str, str]
    token: str | None
    slots: int
    code: Mapping[str, Any] | None


class StartRequest(Part):
    """A part to start now; the code follows on stdin as an archive (tar) of so many `bytes`."""

    bytes: int


class PlanRequest(Part):
    """A part to plan; `start` is how the nodes would stand, as a coordinator says it, None if that is unknown."""

    start: Mapping[str, Any] | None


class BatchRequest(Part):
    """A part that a scheduler starts, see `batch.py`.

    Keys:
        root: the folder of this machine's jobs.
        archive: the file of the code's archive (tar), beside the request; None if the job has no code of its own.
        node_rank_variable: the variable in which the scheduler gives the node rank, such as SLURM_NODEID or
            JOB_COMPLETION_INDEX; None if the job says it, or the nodes agree on it when they meet.
    """

    root: str
    archive: str | None
    node_rank_variable: str | None


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
