"""The logs of jobs on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.backends.base import LogLines
from paceline.backends.refusals import refusals
from paceline.node.logs import reader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paceline.backends.base import LogQuery


def read_logs(path: Path, query: LogQuery) -> Iterator[LogLines]:
    """Lines of the job in a run directory.

    Raises:
        UserError: it has no such attempt or rank.
    """
    choice = reader.Choice(
        None if query.ranks is None else frozenset(query.ranks),
        query.attempt,
        query.since,
        query.tail,
        query.follow,
        query.timed,
        query.raw,
    )
    with refusals():
        reader.check(path, choice)
    return map(LogLines._make, reader.read(path, choice))
