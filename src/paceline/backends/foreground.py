"""A job that somebody watches while it runs: its output and events as they come."""

from __future__ import annotations

import json
import os
import signal
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.node.follow import GrowingFile, Lines, RankLog, Waker

from .submitting import launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.job.spec import JobSpec

    from .base import Progress


@dataclass(frozen=True)
class Output:
    """Bytes that a rank wrote."""

    attempt: int
    rank: int
    local_rank: int
    stream: str
    data: bytes


@dataclass(frozen=True)
class Event:
    """A line of events.jsonl: what happened, and its details."""

    name: str
    details: dict[str, Any]


class LocalRun:
    """A job on this machine that ends with whoever started it."""

    def __init__(self, spec: JobSpec, progress: Progress, split_streams: Callable[[JobSpec], tuple[int, ...]]) -> None:
        """Start it.

        Args:
            spec: what the user asked for.
            progress: hears how far it is.
            split_streams: the local ranks of the completed job whose stderr is kept apart.

        Raises:
            UserError: the job cannot run here.
        """
        self._lifeline, theirs = socket.socketpair()
        with theirs:
            started = launch(spec, progress, lifeline=theirs, split_streams=split_streams)
        self.spec, self.directory, self.process = started.node, started.directory, started.agent

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ask the agent to stop the job; asked twice, it stops it at once."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def updates(self) -> Iterator[Output | Event]:
        """What ranks write and what happens, as it comes, until the agent is gone.

        All output of an attempt comes before the event that tells how the attempt ended.
        """
        waker = Waker()
        events, lines = GrowingFile(self.directory.events), Lines()
        waker.watch(events.path)
        logs: dict[Path, _Log] = {}
        grown: set[Path] | None = None  # the files to look at; None for all
        alive = True
        while True:
            more: set[Path] = set()  # files that may hold more than was read
            for path, log in logs.items():
                if (grown is None or path in grown) and (data := log.file.read()):
                    if log.file.more:
                        more.add(path)
                    yield replace(log.output, data=data)
            for line in lines.add(events.read()):
                details = json.loads(line)
                name = details.pop("event")
                if name in ("waiting", "restarting", "finished"):
                    yield from _drain(logs)
                elif name == "started":
                    logs = _open_logs(details)
                    for path in logs:
                        waker.watch(path)
                    more.update(logs)
                yield Event(name, details)
            if more:
                news = waker.grown()  # one that writes all the time does not keep the others waiting
                grown = None if news is None else more | news
            elif alive:
                grown, closed = waker.wait(self._lifeline.fileno())
                if closed:
                    alive, grown = False, None  # one more look at everything
            else:
                break
        yield from _drain(logs)
        self.process.wait()
        self._lifeline.close()
        waker.close()
        events.close()

    def is_disk_full(self) -> bool:
        """Whether the run directory has no space left for another file."""
        space = os.statvfs(self.directory.path)
        return space.f_bavail * space.f_frsize < 65536

    def status(self) -> dict[str, Any]:
        """What the agent last said of the job."""
        return self.directory.read_status() or {}


@dataclass(frozen=True)
class _Log:
    """A followed log file, and an `Output` that says whose it is."""

    file: GrowingFile
    output: Output


def _open_logs(started: dict[str, Any]) -> dict[Path, _Log]:
    logs: dict[Path, _Log] = {}
    for entry in started["logs"]:
        out, err, error = Path(entry["out"]), Path(entry["err"]), Path(entry["error"])
        what = Output(started["attempt"], entry["rank"], entry["local_rank"], "out", b"")
        if err != out:
            logs[out] = _Log(GrowingFile(out), what)
        logs[err] = _Log(RankLog(err, error), replace(what, stream="both" if err == out else "err"))
    return logs


def _drain(logs: dict[Path, _Log]) -> Iterator[Output]:
    """What is left in the logs of an attempt that is over; they are closed."""
    for log in logs.values():
        while data := log.file.read():
            yield replace(log.output, data=data)
        log.file.close()
    logs.clear()
