"""The lines of a Slurm job, of all its nodes and starts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from paceline.node.errors import Refused
from paceline.node.host.protocol import end_with_stdin
from paceline.node.host.slurm.job_folders import Jobs
from paceline.node.journal.state import FINAL
from paceline.node.logs.query import LogQuery
from paceline.node.logs.reader import NoLog, attempts, check, read
from paceline.node.readers import Ended, Readers, in_order

from . import job_record
from .queue import Queue

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paceline.contract.messages import LogAnswer, Logs
    from paceline.node.host.slurm.job_folder import JobFolder
    from paceline.node.logs.query import LogLines
    from paceline.node.rundir.directory import RunDirectory
    from paceline.node.store.home import Home

_LOOK = 1.0  # seconds between two looks for another start, or the end


def slurm_logs(home: Home, request: Logs) -> Iterator[LogAnswer]:
    """What ranks wrote: lines, each followed by the bytes."""
    end_with_stdin()
    folder = Jobs(home.root).of(request["name"])
    query = LogQuery(**request["query"])
    _check(folder, query)
    yield {"begin": True}
    written = [] if query.follow else [read(run.path, query) for run in _runs(folder, query)]
    for lines in _Follower(home, folder, query).read() if query.follow else in_order(written):
        yield {"lines": lines[:4], "data": lines.text}
    yield {"end": True}


def _check(folder: JobFolder, query: LogQuery) -> None:
    """Check that the job has what is chosen; a rank may be on any of its nodes."""
    runs = _runs(folder, query, started=False)
    if not runs:
        all_runs = [run for _, runs in job_record.runs_of(folder) for run in runs]
        if all_runs:
            check(all_runs[-1].path, query)
        elif query.attempt is not None:
            raise Refused(f"job {folder.name} has no attempt {query.attempt}; none has started yet; correct --attempt")
        return
    for rank in sorted(query.ranks or ()):
        problems = list(filter(None, (_absent(run, replace(query, ranks=(rank,))) for run in runs)))
        if len(problems) == len(runs) == 1:
            raise problems[0]
        if len(problems) == len(runs) and not query.follow:  # else it may write one yet
            raise Refused(f"rank {rank} of job {folder.name} wrote no log yet; correct -i")


def _absent(run: RunDirectory, query: LogQuery) -> NoLog | None:
    """Why a node has no lines of the chosen rank, which another one may have."""
    try:
        check(run.path, query)
    except NoLog as error:
        return error
    return None


def _runs(folder: JobFolder, query: LogQuery, *, started: bool = True) -> list[RunDirectory]:
    """The run directories with the attempt, those of the last start that has one; `started`: only if it has logs."""
    for _, runs in reversed(job_record.runs_of(folder)):
        those = [(run, attempts(run.path)) for run in runs]
        having = [run for run, found in those if query.attempt in (None, *found) and (found or not started)]
        if having:
            return having
    return []


class _Follower:
    """Reads the logs of all nodes, and of the starts that come, until the job has ended."""

    def __init__(self, home: Home, folder: JobFolder, query: LogQuery) -> None:
        self._home, self._folder, self._query = home, folder, query
        self._readers: Readers[Path, LogLines] = Readers()
        self._read: set[Path] = set()
        self._over: set[str] = set()  # starts that have ended

    def read(self) -> Iterator[LogLines]:
        """The lines as they come."""
        is_first, is_over = True, False
        while True:
            self._over = {str(start) for start in self._folder.starts if self._folder.outcome(start) is not None}
            record = job_record.record(self._folder, Queue(self._home.root))
            is_over = is_over or record is None or record["state"] in FINAL
            self._begin(is_first)
            is_first = False
            for _, found in self._readers.arrived(_LOOK):
                if not isinstance(found, Ended):
                    yield found
                elif found.error is not None and not isinstance(found.error, OSError):  # it was removed
                    raise found.error
            if is_over and not self._readers.active:
                return

    def _begin(self, is_first: bool) -> None:
        """Start to read what has come: at first the chosen lines of the last start, then all of the later ones."""
        starts = job_record.runs_of(self._folder)
        if self._query.attempt is not None:
            runs = _runs(self._folder, self._query)
            starts = [(start, those) for start, those in starts if those and those[0] in runs]
        for start, runs in starts[-1:] if is_first else starts:
            for run in runs:
                if run.path not in self._read:
                    query = self._query if is_first else replace(self._query, since=None, tail=None)
                    self._read.add(run.path)
                    self._readers.add(run.path, read(run.path, query, partial(self._is_past, run, str(start))))
        if is_first:
            self._read.update(run.path for _, runs in starts for run in runs)

    def _is_past(self, run: RunDirectory, start: str) -> bool:
        """Whether nothing is written to a run directory any more."""
        return (run.read_status() or {}).get("state") in FINAL or start in self._over
