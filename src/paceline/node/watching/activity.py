"""Whether a rank moves: pure state, fed with what is seen of it from time to time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .outside import Family, Process

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.contract.stands import Answer

# What a process does that only waits: it wakes now and then to look whether something has come. A DataLoader does every
# 5 s, for about 0.1 ms.
_LEAST_CPU = 0.001  # of a core, used by the main thread
_LEAST_ALL = 0.01  # of a core, used by all threads, or by all children
_LEAST_TICKS = 0.03  # seconds of that; it is counted in ticks of 0.01 s
_LEAST_MOVED = 4096  # bytes per second
_LEAST_SWITCHES = 1.0  # per second, of a main thread that waits on a socket


class Activity:
    """What one rank has done until now.

    Attributes:
        process: as it was seen last.
        family: the same of its descendants; None while it works itself.
    """

    def __init__(self, now: float) -> None:
        self.process = Process()
        self.family: Family | None = None
        self._seen = self._still_since = self._idle_since = now
        self._numbers: dict[str, int] = {}
        self._carries = True  # whether bytes moved on its connections when it was seen last

    def see(self, process: Process, now: float, children: Callable[[], Family]) -> None:
        """Take in how the process is now; `children` looks at its descendants, if it does not work itself."""
        before, seconds = self.process, now - self._seen
        least = max(_LEAST_ALL * seconds, _LEAST_TICKS)
        works = (
            process.cpu - before.cpu >= _LEAST_CPU * seconds
            or process.all_cpu - before.all_cpu >= least
            or process.moved - before.moved >= _LEAST_MOVED * seconds
        )
        known, self.family = self.family, None if works else children()
        if self.family is not None:
            is_same = known is not None and len(known.children) == len(self.family.children)
            works = known is None or not is_same or self.family.cpu - known.cpu >= least
            # A library that sends its metrics every 15 s does not let a hang go on for ever.
            carried, self._carries = self._carries, self._carry(known, before, process, seconds)
            works = works or (carried and self._carries)
        if works and process.state not in ("T", "t", "Z", ""):
            self._idle_since = now
        self.process, self._seen = process, now

    def _carry(self, known: Family | None, before: Process, process: Process, seconds: float) -> bool:
        """Whether the main thread, or a connection, has got on with what is sent and received."""
        if known is None or self.family is None:
            return True
        if known.carried is not None and self.family.carried is not None:
            moved = sum(now - known.carried.get(inode, 0) for inode, now in self.family.carried.items())
            return moved >= _LEAST_MOVED * seconds
        waits_there = process.call == "poll" or process.file.startswith("socket:")
        return waits_there and process.switches - before.switches >= _LEAST_SWITCHES * seconds

    def hear(self, answer: Answer, now: float) -> None:
        """Take in what the rank has answered."""
        if answer["numbers"] != self._numbers:
            self._numbers, self._still_since = answer["numbers"], now

    def still(self, now: float) -> float:
        """Seconds for which it has entered no collective."""
        return now - self._still_since

    def idle(self, now: float) -> float:
        """Seconds for which it has not worked."""
        return now - self._idle_since
