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
    from collections.abc import Mapping, Sequence
    from io import BufferedReader
    from typing import TypedDict

    from typing_extensions import NotRequired

    class Part(TypedDict):
        """What a client asks a machine elsewhere to make: its part of a job. Most keys are those of `plan.Order`.

        Keys:
            job: the requested job, as a `JobSpec` in JSON.
            data: the job's volumes: volume, path, wanted, variable.
            job_id: identifier that its nodes share; None makes a new one.
            hosts: the names of the nodes as the user knows them, by node rank.
            joins: the job runs elsewhere already.
            rank_streams: which streams of which ranks the client shows; None if it shows none.
            terminal: variables of the terminal that shows the ranks.
            secrets: variables that are never shown.
            token: secret with which the nodes authenticate each other.
            slots: number of slots of the machine if it has no accelerators.
            code: record of the job's code; None if it has no code of its own.
            brought: what comes from a job elsewhere that it goes on from, see `plan.Brought`, and `bytes`, the size of
                the checkpoint's archive, 0 if the checkpoint is there already or goes to another node.
        """

        job: dict[str, Any]
        data: Sequence[Mapping[str, Any]]
        job_id: str | None
        hosts: Sequence[str]
        joins: bool
        rank_streams: Mapping[str, Any] | None
        terminal: Mapping[str, str]
        secrets: Mapping[str, str]
        token: str | None
        slots: int
        code: Mapping[str, Any] | None
        brought: NotRequired[Mapping[str, Any] | None]

    class StartRequest(Part):
        """A part to start now; the code follows on stdin as an archive (tar) of `bytes` bytes.

        Keys:
            reconnect: seconds for which a client that follows the job tries to connect again when its connection has
                broken; with 0 it does not.
        """

        bytes: int
        reconnect: float

    class RejoinRequest(TypedDict):
        """The client of a held job is back, after its connection broke.

        Keys:
            name, job_id: the job.
            seen: how many answers it has received since it held the job.
        """

        name: str
        job_id: str
        seen: int

    class PlanRequest(Part):
        """A part to plan; `start` is the first attempt, as a coordinator would send it, None if it is unknown."""

        start: Mapping[str, Any] | None

    class BatchRequest(Part):
        """A part that a scheduler starts, see `batch.py`.

        Keys:
            root: the folder of this machine's jobs.
            archive: the file of the code's archive (tar, or tar.gz), beside the request; None if the job has no code of
                its own.
            node_rank_variable: the variable in which the scheduler gives the node rank, such as SLURM_NODEID or
                JOB_COMPLETION_INDEX; None if the job has it, or the nodes agree on it when they connect.
            address_variable: the variable in which it gives the address at which the others reach this node; None if
                the agent finds it.
            peers: where the agents listen, by node rank, if the scheduler starts another node for one that is lost.
            late_nodes: whether the scheduler starts nodes of an elastic job also when it has ended.
            ends_with_first: whether it takes the job for ended when node 0 has, and ends the others.
            cloned: the folder beside the request into which git has fetched the code; its commit is in the file
                `commit` there.
            kept_logs: the folder in which its logs are kept too, see `pod.KeptLog`.
        """

        root: str
        archive: str | None
        node_rank_variable: str | None
        address_variable: str | None
        peers: Sequence[str]
        late_nodes: bool
        ends_with_first: bool
        cloned: NotRequired[str | None]
        kept_logs: NotRequired[str | None]


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
