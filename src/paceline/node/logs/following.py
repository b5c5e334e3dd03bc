"""Follows a running job: the output of its ranks, and its events."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Union

from paceline.node.eventloop.inotify import Waker
from paceline.node.files import Irregular
from paceline.node.journal.records import for_people, parsed

from .growing_file import GrowingFile, Lines, RankLog

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from paceline.contract.messages import JobAnswer
    from paceline.contract.nodejob import RankStreams
    from paceline.contract.records import EventRecord
    from paceline.node.rundir.directory import RunDirectory

STREAM_BITS = {"out": 1, "err": 2, "both": 3}  # as torchrun counts them


@dataclass(frozen=True)
class Output:
    """Bytes that a rank wrote."""

    attempt: int
    rank: int
    local_rank: int  # on its node
    stream: str  # "out", "err", or "both" where both go to one file
    data: bytes  # the bytes
    # whether they are of the traceback that ended the rank, which the failure report shows too
    is_traceback: bool = False


@dataclass(frozen=True)
class Event:
    """A record of the journal that people see: the name of the event, and its details."""

    name: str
    details: EventRecord


Update = Union[Output, Event]


def shown_by(rank_streams: RankStreams) -> Callable[[Output], bool]:
    """Which output a client shows."""
    return lambda it: bool(rank_streams.of(it.rank, it.local_rank) & STREAM_BITS[it.stream])


def answer_of(update: Update) -> JobAnswer:
    """An update as it is sent to a client."""
    if isinstance(update, Output):
        return {"output": (update.attempt, update.rank, update.local_rank, update.stream), "data": update.data}
    return {"event": update.name, "details": update.details}


def update_of(answer: JobAnswer) -> Update | None:
    """An update as it was sent; None if it is something else."""
    if "output" in answer:
        attempt, rank, local_rank, stream = answer["output"]
        return Output(attempt, rank, local_rank, stream, answer["data"])
    return Event(answer["event"], answer["details"]) if "event" in answer else None


@dataclass(frozen=True)
class _Log:
    """A followed log file, and an `Output` with its rank and stream."""

    file: GrowingFile
    output: Output


def updates(
    run: RunDirectory,
    lifeline: int,
    wanted: Callable[[Output], bool] = lambda _: True,
    begin: int = 0,
    poll: float | None = None,
    *,
    tracebacks: bool = False,
    positions: Mapping[tuple[int, str], int] | None = None,
) -> Iterator[Update]:
    """The output of the ranks and the events of the job, until the agent is gone.

    All output of an attempt comes before the event that ends the attempt: "restarting" or "finished". "finished" has
    the seconds that the job `took` from its start; None if it never started.
    """
    is_elsewhere, lines = poll is not None, Lines()
    logs: dict[Path, _Log] = {}
    grown: set[Path] | None = None  # the files to read; None for all
    alive = True
    with contextlib.closing(Waker(poll)) as waker, contextlib.closing(GrowingFile(run.journal)) as journal:
        journal.offset = begin
        waker.watch(journal.path)
        while True:
            more: set[Path] = set()  # files that may hold more than was read
            for path in logs if grown is None else grown & logs.keys():
                log = logs[path]
                if data := log.file.read():
                    if log.file.more:
                        more.add(path)
                    yield replace(log.output, data=data, is_traceback=log.file.is_traceback)
            for details in for_people(parsed(lines.add(journal.read()))):
                event = _event(details, run)
                if event.name in ("waiting", "restarting", "finished", "started"):
                    yield from _drain(logs, is_elsewhere)
                if event.name == "started":
                    logs = _open_logs(run, event.details, wanted, tracebacks=tracebacks)
                    for path in logs:
                        logs[path].file.offset = (positions or {}).get((event.details["attempt"], path.name), 0)
                        waker.watch(path)
                    more.update(logs)
                yield event
            more.update([journal.path] if journal.more else [])
            if more:
                others = waker.grown()  # a rank that writes continuously does not delay the others
                grown = None if others is None else more | others
            elif alive:
                grown, closed = waker.wait(lifeline)
                if closed:
                    alive, grown = False, None  # read everything once more
                    _reopen([journal, *(log.file for log in logs.values())] if is_elsewhere else [])
            else:
                break
        yield from _drain(logs, is_elsewhere)


def _event(details: EventRecord, run: RunDirectory) -> Event:
    name = details.pop("event")
    if name == "finished":
        started = (run.read_status() or {}).get("started")
        details["took"] = None if started is None else details["time"] - started
    return Event(name, details)


def _open_logs(
    run: RunDirectory, started: EventRecord, wanted: Callable[[Output], bool], *, tracebacks: bool
) -> dict[Path, _Log]:
    logs: dict[Path, _Log] = {}
    for entry in started["logs"]:
        folder = run.path / "logs" / str(started["attempt"])  # the agent's machine may have another name for it
        out, err, error = folder / Path(entry["out"]).name, folder / Path(entry["err"]).name, Path(entry["error"])
        what = Output(started["attempt"], entry["rank"], entry["local_rank"], "out", b"")
        with contextlib.suppress(FileNotFoundError, Irregular):  # it was deleted
            if err != out and wanted(what):
                logs[out] = _Log(GrowingFile(out), what)
            what = replace(what, stream="both" if err == out else "err")
            if wanted(what):
                logs[err] = _Log(RankLog(err, error, keeps_traceback=tracebacks), what)
    return logs


def _reopen(files: Iterable[GrowingFile]) -> None:
    for file in files:
        file.reopen()


def _drain(logs: dict[Path, _Log], is_elsewhere: bool) -> Iterator[Output]:
    """Read the rest of the logs of an attempt that is over, and close them."""
    _reopen(log.file for log in logs.values() if is_elsewhere)
    for log in logs.values():
        while data := log.file.read():
            yield replace(log.output, data=data, is_traceback=log.file.is_traceback)
        log.file.close()
    logs.clear()
