"""The logs of jobs on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.job.errors import UserError
from paceline.node import logs
from paceline.node.run_directory import RunDirectory, read_json

from .base import LogLines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .base import LogQuery


def read_logs(path: Path, query: LogQuery) -> Iterator[LogLines]:
    """Lines of the job in a run directory.

    Raises:
        UserError: it has no such attempt or rank.
    """
    existing = logs.attempts(path)
    if query.attempt is not None and query.attempt not in existing:
        has = f"there are {_listed(existing)}" if existing else "none has started yet"
        raise UserError(f"job {path.name} has no attempt {query.attempt}: {has}; correct --attempt")
    for rank in query.ranks or ():
        _check_rank(path, rank, existing if query.attempt is None else [query.attempt])
    choice = logs.Choice(
        None if query.ranks is None else frozenset(query.ranks),
        query.attempt,
        query.since,
        query.tail,
        query.follow,
        query.timed,
        query.raw,
    )
    return map(LogLines._make, logs.read(path, choice))


def _check_rank(path: Path, rank: int, attempts: list[int]) -> None:
    spec = read_json(RunDirectory(path).spec) or {"nproc": 1, "nodes": 1}
    count = spec["nproc"] * spec["nodes"]
    if rank >= count:
        has = "rank 0 alone" if count == 1 else f"ranks 0 … {count - 1}"
        raise UserError(f"job {path.name} has {has}, not rank {rank}; correct -i")
    here = sorted({known for attempt in attempts for known in logs.ranks(path, attempt)})
    if here and rank not in here:
        raise UserError(f"rank {rank} of job {path.name} wrote no log here, but these did: {_listed(here)}; correct -i")


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
