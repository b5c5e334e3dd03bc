"""The logs of jobs on hosts."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from paceline.backends.base import LogLines

from .streams import Streams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.backends.base import LogQuery

    from .connection import Host


def read_logs(name: str, hosts: Sequence[Host], query: LogQuery) -> Iterator[LogLines]:
    """Lines of a job in the order in which they were written, of several hosts as they come.

    Raises:
        UserError: it has no such attempt or rank, or a host does not answer.
    """
    request = {"do": "logs", "name": name, "choice": dataclasses.asdict(query), "checked": len(hosts) == 1}
    streams = Streams(hosts, lambda _: request)
    first = streams.next()  # so that a query without an answer fails at once
    assert first is not None
    lines = _lines(streams)
    if len(hosts) == 1 or query.follow:
        return lines
    return iter(_last(sorted(lines, key=lambda it: (it.attempt, it.time)), query.tail))


def _lines(streams: Streams) -> Iterator[LogLines]:
    with contextlib.closing(streams):
        while (found := streams.next()) is not None:
            if "text" in found[1]:
                moment, attempt, rank, stream = found[1]["text"]
                yield LogLines(moment, attempt, rank, stream, found[1]["data"])


def _last(found: list[LogLines], count: int | None) -> list[LogLines]:
    """The last lines of them."""
    if count is None:
        return found
    kept: list[LogLines] = []
    while found and count > 0:
        it = found.pop()
        lines = it.text.splitlines(keepends=True)[-count:]
        kept.append(it._replace(text=b"".join(lines)))
        count -= len(lines)
    return kept[::-1]
