"""Which lines of a job's logs are wanted, and the lines: the same for a node that reads them and a client that asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class LogQuery:
    """Which lines of a job's logs."""

    ranks: tuple[int, ...] | None = (0,)  # of these; None for all
    follow: bool = False  # continue until the job, or the chosen attempt, has ended
    tail: int | None = None  # how many of the last lines of each node; None for all
    since: float | None = None  # only lines whose end was written then or later, in seconds since the epoch
    attempt: int | None = None  # of this attempt; None for the last one, and with `follow` for later ones too
    # whether times must be exact even if the order does not need them; otherwise they may be too late
    timed: bool = False
    raw: bool = False  # with `follow`, pass on unfinished lines too, such as a progress bar


class LogLines(NamedTuple):
    """Lines of one rank, with their line ends.

    The last line of an attempt may have no line end. A line of more than 1 MiB comes in pieces without line ends.
    """

    time: float  # when the ends of these lines were written (about), in seconds since the epoch
    attempt: int  # the attempt that they belong to
    rank: int  # the rank that wrote them
    stream: str  # "e" for stderr if it has a file of its own, else "o"
    text: bytes  # the bytes as in the file
