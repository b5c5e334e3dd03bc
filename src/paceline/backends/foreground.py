"""A job that somebody watches while it runs: its output and events as they come."""

from __future__ import annotations

import signal
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.node.following import STREAM_BITS, Event, Output, Update, is_disk_full, updates

from .submitting import launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.job.spec import JobSpec

    from .base import Progress

__all__ = ["STREAM_BITS", "Event", "Foreground", "LocalRun", "Output", "Shown", "Update", "how_it_ended"]


@dataclass(frozen=True)
class Shown:
    """Which streams of which local ranks are shown, in torchrun's numbers: 1 stdout, 2 stderr, 3 both.

    Attributes:
        first: where rank 0 is.
        others: on the other hosts of a run.
        split: the local ranks whose stderr is kept apart.
        several: whether more than one rank is shown.
    """

    first: dict[int, int]
    others: dict[int, int]
    split: tuple[int, ...]
    several: bool

    def of(self, rank: int, local_rank: int) -> int:
        """The streams of a rank."""
        return (self.others if rank else self.first).get(local_rank, 0)


class Foreground(Protocol):
    """A run that is watched.

    Attributes:
        name: of the job.
        first_line: what is said of it first.
        max_restarts: how often it may start again.
    """

    name: str
    first_line: str
    max_restarts: int

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ask to stop the job; asked twice, it is stopped at once."""

    def updates(self) -> Iterator[Update]:
        """What ranks write and what happens, as it comes, until the job is over."""

    def leads(self, output: Output) -> bool:
        """Whether this is the rank that is shown as it writes."""

    def last_words(self) -> tuple[int, list[str]]:
        """An exit code and an explanation, for a job that is over without a word."""


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
        self._directory, self._process = started.directory, started.agent
        self.name, self.max_restarts = started.node.job, started.node.max_restarts
        ranks = f"{started.node.nproc} rank{'' if started.node.nproc == 1 else 's'}"
        self.first_line = f"{ranks} here, logs in {self._directory.path}"

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ask the agent to stop the job; asked twice, it stops it at once."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def updates(self) -> Iterator[Update]:
        """What ranks write and what happens, as it comes, until the agent is gone."""
        yield from updates(self._directory, self._lifeline.fileno())
        self._process.wait()
        self._lifeline.close()

    def leads(self, output: Output) -> bool:
        """Whether this is the first rank here."""
        return output.local_rank == 0

    def last_words(self) -> tuple[int, list[str]]:
        """What became of the agent."""
        log = None if is_disk_full(self._directory) else self._directory.agent_log
        code, lines = how_it_ended(self._process.returncode, self._process.pid, log)
        if log is None:
            lines.append(f"no space is left in {self._directory.path}; free some, or choose another --log-dir")
        return code, lines


def how_it_ended(code: int, pid: int, log: object, on: str = "") -> tuple[int, list[str]]:
    """The exit code of a job whose agent ended without a word, and what is to be said of that.

    Args:
        code: the agent's.
        pid: the agent's.
        log: where it printed, None where that says nothing.
        on: says on which host.
    """
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    lines = [f"the job's agent{on} (pid {pid}) ended without a word ({how}); its ranks were ended too"]
    if log is not None:
        lines.append(f"what it printed is in {log}{on}")
    return 128 - code if code < 0 else code or 1, lines
