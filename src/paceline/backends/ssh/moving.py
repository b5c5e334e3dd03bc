"""The export of a job on hosts, for a job on another target that resumes it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from paceline.backends.moving import export_of
from paceline.backends.remote.connection import Unreachable
from paceline.job.errors import UserError

from .streams import Streams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    from paceline.backends.base import JobExport
    from paceline.backends.remote.connection import Host
    from paceline.contract.messages import OfJob
    from paceline.contract.records import Inventory
    from paceline.node.store.moving import Writable


def export_of_hosts(hosts: Sequence[Host], missing: Sequence[str], name: str, *, fresh: bool) -> JobExport:
    """Its code and newest checkpoint: the newest checkpoint of all, and the code of the same host."""
    answers: dict[Host, Inventory] = {}
    silent = list(missing)
    request: OfJob = {"do": "inventory", "name": name}
    with contextlib.closing(Streams(hosts, lambda _: request)) as streams:
        while (news := streams.take()) is not None:
            host, answer = news
            if isinstance(answer, Unreachable):
                silent.append(str(answer))
            elif isinstance(answer, UserError):
                raise answer
            elif "inventory" in answer:
                answers[host] = answer["inventory"]
    if not answers:
        raise UserError(
            f"{silent[0]}; what job {name} has left is there, so it cannot go on elsewhere before that answers"
        )

    def age(host: Host) -> tuple[int, int]:
        checkpoint = answers[host]["checkpoint"]
        return (-1, -1) if checkpoint is None else (checkpoint["serial"], checkpoint["step"])

    host = max((host for host in hosts if host in answers), key=age)  # the first one if none has any
    found = answers[host]
    if silent and not fresh and found["checkpoint"] is None:
        raise UserError(
            f"{silent[0]}; it may have the checkpoints of job {name}; try later, or begin anew with --fresh"
        )

    def write(what: Literal["code", "checkpoint"], ids: dict[str, str], out: Writable) -> None:
        with host.listen({"do": "carry", "name": name, "what": what, "ids": ids, "fresh": fresh}) as pieces:
            for piece in pieces:
                if "end" in piece:
                    return
                out.write(piece["data"])

    lines = tuple(f"{line}; what it has of job {name} is not looked at" for line in silent)
    return export_of(name, host.name, found, write, lines)
