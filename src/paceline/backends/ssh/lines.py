"""The log lines of a job on several hosts, as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.backends.remote.lines import lines_of
from paceline.job.errors import UserError
from paceline.node.logs.readers import Ended

from .streams import Streams

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.backends.base import LogLines
    from paceline.backends.remote.connection import Host, Request


class Followed:
    """See `follow.Arrivals`."""

    def __init__(self, hosts: Iterable[Host], request: Request) -> None:
        self._streams = Streams(hosts, lambda _: request)

    def take(self) -> tuple[Host, LogLines | Ended] | None:
        for host, answer in iter(self._streams.take, None):
            if isinstance(answer, UserError):
                return host, Ended(answer)
            if "lines" in answer:
                return host, lines_of(answer)
        return None

    def close(self) -> None:
        self._streams.close()
