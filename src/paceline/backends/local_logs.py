"""The logs of jobs on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.node import logs

from .base import LogLines
from .refusals import refusals

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .base import LogQuery


def read_logs(path: Path, query: LogQuery) -> Iterator[LogLines]:
    """Lines of the job in a run directory.

    Raises:
        UserError: it has no such attempt or rank.
    """
    choice = logs.Choice(
        None if query.ranks is None else frozenset(query.ranks),
        query.attempt,
        query.since,
        query.tail,
        query.follow,
        query.timed,
        query.raw,
    )
    with refusals():
        logs.check(path, choice)
    return map(LogLines._make, logs.read(path, choice))
