"""A job on this machine that ends with the client."""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING

from paceline.backends.foreground import how_it_ended
from paceline.contract.placement import MAIN_PORT
from paceline.contract.values import join_address
from paceline.job.text import counted
from paceline.node.files import is_disk_full
from paceline.node.logs.following import Output, Update, updates
from paceline.node.store.records import agent_pid

from .at_hand import what_stays
from .prepare import LocalPrepared
from .start import start

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.backends.base import Prepared, ProgressReporter
    from paceline.backends.foreground import RankStreams
    from paceline.job.spec import JobSpec


class LocalRun:
    """A job on this machine that ends with the client."""

    def __init__(self, prepared: Prepared, progress: ProgressReporter, rank_streams: RankStreams) -> None:
        """Start it."""
        assert isinstance(prepared, LocalPrepared)
        says = prepared.stays and prepared.spec.start_method == "fork" and bool(prepared.spec.preload)
        line = what_stays(prepared.plan.home.root) if says else ""
        self._lifeline, theirs = socket.socketpair()
        with theirs:
            started = start(prepared, progress, lifeline=theirs, rank_streams=rank_streams)
        self._directory, self._process = started.run, started.agent
        if line:
            progress.say(line)
        self.name, self.max_restarts = started.node.job, started.node.max_restarts
        ranks = counted(started.node.nproc, "rank")
        self.first_line = f"{ranks} here, logs in {self._directory.path}{_meeting(prepared.spec)}"

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ask the agent to stop the job; asked twice, it stops it at once."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    pass_on = interrupt

    def updates(self) -> Iterator[Update]:
        """Output of the ranks and events, until the agent has ended."""
        yield from updates(self._directory, self._lifeline.fileno())
        self._process.wait()
        self._lifeline.close()

    def leads(self, output: Output) -> bool:
        """Whether this is the first rank here."""
        return output.local_rank == 0

    def unreported_end(self) -> tuple[int, list[str]]:
        """The agent's exit code, and lines that explain it."""
        log = None if is_disk_full(self._directory.path) else self._directory.agent_log
        code, lines = how_it_ended(self._process.wait(), agent_pid(self._directory, self._process.pid), log)
        if log is None:
            lines.append(f"no space is left in {self._directory.path}; free some, or choose another --log-dir")
        return code, lines


def _meeting(spec: JobSpec) -> str:
    """What a job waits for that others start on other nodes."""
    least, most = spec.node_range
    address = spec.rendezvous.main_address
    if most == 1 or address is None:
        return ""
    nodes = str(least) if least == most else f"{least} to {most}"
    return f"; waiting for {nodes} nodes at {join_address(address, spec.rendezvous.main_port or MAIN_PORT)}"
