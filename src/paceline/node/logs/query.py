"""Which lines of a job's logs are wanted, and the lines: the same for a node that reads them and a client that asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class LogQuery:
    """Which lines of a job's logs.

    Attributes:
        ranks: of these; None for all.
        follow: continue until the job, or the chosen attempt, has ended.
        tail: how many of the last lines of each node; None for all.
        since: only lines whose end was written then or later, in seconds since the epoch.
        attempt: of this attempt; None for the last one, and with `follow` for later ones too.
        timed: whether times must be exact even if the order does not need them; otherwise they may be too late.
        raw: with `follow`, pass on unfinished lines too, such as a progress bar.
    """

    ranks: tuple[int, ...] | None = (0,)
    follow: bool = False
    tail: int | None = None
    since: float | None = None
    attempt: int | None = None
    timed: bool = False
    raw: bool = False


class LogLines(NamedTuple):
    """Lines of one rank, with their line ends.

    The last line of an attempt may have no line end. A line of more than 1 MiB comes in pieces without line ends.

    Attributes:
        time: when the ends of these lines were written (about), in seconds since the epoch.
        attempt: the attempt that they belong to.
        rank: the rank that wrote them.
        stream: "e" for stderr if it has a file of its own, else "o".
        text: the bytes as in the file.
    """

    time: float
    attempt: int
    rank: int
    stream: str
    text: bytes
