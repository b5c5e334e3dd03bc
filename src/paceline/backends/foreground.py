"""A job in the foreground: its output and events while it runs."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Protocol

from paceline.contract.nodejob import RankStreams
from paceline.node.logs.following import STREAM_BITS, Event, Output, Update
from paceline.node.signals import PASSED_ON, call_on

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


__all__ = [
    "STREAM_BITS",
    "Event",
    "Foreground",
    "Output",
    "RankStreams",
    "Update",
    "how_it_ended",
    "obey_signals",
]


class Foreground(Protocol):
    """A job that ends with this process.

    Attributes:
        first_line: the first message about it.
        max_restarts: how many restarts after failures it may have.
    """

    name: str
    first_line: str
    max_restarts: int

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ask to stop the job; asked twice, it is stopped at once."""

    def pass_on(self, number: int) -> None:
        """Pass a signal on to the agents, which give it to the ranks that handle it."""

    def updates(self) -> Iterator[Update]:
        """Output of the ranks and events, until the job has ended."""

    def leads(self, output: Output) -> bool:
        """Whether this is the rank that is shown without a prefix, as it writes."""

    def unreported_end(self) -> tuple[int, list[str]]:
        """An exit code and an explanation, for a job that ended without a report."""


def obey_signals(job: Foreground, early: Sequence[int] = ()) -> None:
    """Let Ctrl-C and SIGTERM stop a job, and SIGUSR1 and SIGUSR2 reach its ranks, as long as this process lives.

    Those that it ignores stay ignored: a shell without job control ignores SIGINT in the background.
    Those of `early` came before there was a job.
    """
    signals = (signal.SIGINT, signal.SIGTERM, *PASSED_ON)
    call_on(
        [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN],
        lambda number: job.pass_on(number) if number in PASSED_ON else job.interrupt(number),
    )
    for number in early:
        job.pass_on(number)


def how_it_ended(code: int, pid: int, log: object, on: str = "") -> tuple[int, list[str]]:
    """The exit code of a job whose agent, on " on HOST", ended without a report, and lines that explain it."""
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    lines = [f"the job's agent{on} (pid {pid}) ended without a report ({how}); its ranks were ended too"]
    if log is not None:
        lines.append(f"what it printed is in {log}{on}")
    return 128 - code if code < 0 else code or 1, lines


def terminal_size() -> dict[str, str]:
    """The size of the terminal that shows rank 0, so that its progress bars fit though it writes to a file."""
    if not sys.stdout.isatty():
        return {}
    size = os.get_terminal_size(sys.stdout.fileno())
    columns = str(size.columns or 80)  # 0 when the terminal does not know
    # tqdm has a variable of its own; the last two make rich draw although it writes to a file.
    return {
        "COLUMNS": columns,
        "LINES": str(size.lines or 24),
        "TQDM_NCOLS": columns,
        "TTY_COMPATIBLE": "1",
        "TTY_INTERACTIVE": "1",
    }
