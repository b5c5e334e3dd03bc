"""The logs of jobs on hosts."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from paceline.backends.base import Incomplete, LogLines
from paceline.backends.remote.connection import Unreachable
from paceline.job.errors import UserError

from .streams import Streams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.backends.base import LogQuery
    from paceline.backends.remote.connection import Answer, Host


def read_logs(name: str, hosts: Sequence[Host], query: LogQuery) -> Iterator[LogLines]:
    """Lines of a job in the order in which they were written, of several hosts as they come.

    Raises:
        UserError: it has no such attempt or rank, or none of its hosts answers.
        Incomplete: some hosts did not answer, or no longer; after the lines of the others.
    """
    request = {"do": "logs", "name": name, "choice": dataclasses.asdict(query), "checked": len(hosts) == 1}
    streams = Streams(hosts, lambda _: request)
    first = streams.take()  # so that a query without an answer fails at once
    assert first is not None
    if isinstance(first[1], UserError) and not _can_go_on(first[1], hosts):
        raise first[1]
    lines = _lines(streams, hosts, first, query.follow)
    if len(hosts) == 1 or query.follow:
        return lines
    return _in_order(lines, query.tail)


def _can_go_on(error: UserError, hosts: Sequence[Host]) -> bool:
    """Whether other hosts may have lines although one has failed."""
    return len(hosts) > 1 and isinstance(error, Unreachable)


def _lines(
    streams: Streams, hosts: Sequence[Host], first: tuple[Host, Answer | UserError], follow: bool
) -> Iterator[LogLines]:
    """The lines of all hosts.

    Raises:
        UserError: no host answers.
        Incomplete: after them, if some hosts do not answer; if they are followed, perhaps none any more.
    """
    silent: list[UserError] = []
    with contextlib.closing(streams):
        found: tuple[Host, Answer | UserError] | None = first
        while found is not None:
            answer = found[1]
            if isinstance(answer, UserError):
                if not _can_go_on(answer, hosts):
                    raise answer
                silent.append(answer)
            elif "text" in answer:
                moment, attempt, rank, stream = answer["text"]
                yield LogLines(moment, attempt, rank, stream, answer["data"])
            found = streams.take()
    if len(silent) == len(hosts) and not follow:
        raise silent[0]
    if silent:
        raise Incomplete("\n".join(f"{error}; lines of its ranks may be missing" for error in silent))


def _in_order(lines: Iterator[LogLines], count: int | None) -> Iterator[LogLines]:
    """The last lines in the order of time, and then the error with which they ended."""
    found: list[LogLines] = []
    failure: Incomplete | None = None
    try:
        found.extend(lines)
    except Incomplete as error:
        failure = error
    yield from _last(sorted(found, key=lambda it: (it.attempt, it.time)), count)
    if failure is not None:
        raise failure


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
