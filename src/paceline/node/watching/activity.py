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
        if works and process.state not in ("T", "t", "Z", ""):
            self._idle_since = now
        self.process, self._seen = process, now

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
