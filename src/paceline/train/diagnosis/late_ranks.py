"""When a rank that waits in a collective asks where the other ranks are, and the warning that names late ranks."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from .collective_trace import current_line, entered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .collective_trace import Place, Trace

log = logging.getLogger("paceline")
ASK_SECONDS = 5.0  # in a collective, after which a rank asks where the others are; then less and less often
_LONGEST_PAUSE = 60.0  # seconds between two questions
LATE_SECONDS = 30.0  # in a collective, after which a warning names the ranks that are missing


class LateRanks:
    """The questions of one rank about the others; the caller sends them."""

    def __init__(self, trace: Trace) -> None:
        self.due = time.monotonic() + ASK_SECONDS  # when to look again whether to ask, on `time.monotonic`'s clock
        self._trace = trace
        self._reported: set[str] = set()  # collectives whose late ranks a warning has named

    def is_time_to_ask(self) -> bool:
        """Whether this rank has been in a collective for long enough to ask; sets `due`."""
        seconds = self._trace.seconds
        if seconds is None or seconds < ASK_SECONDS:
            self.due = time.monotonic() + ASK_SECONDS - (seconds or 0.0)
            return False
        self._postpone(seconds)
        return True

    def answer(self) -> Place:
        """Where this rank is. All ranks answer the same question, so this rank's own next question can wait."""
        self._postpone(self._trace.seconds or 0.0)
        return self._trace.place(current_line(threading.main_thread().ident or 0))

    def warn(
        self, late: Sequence[tuple[int, str | None]], waits: int | None = None, place: Place | None = None
    ) -> None:
        """Name, once per collective, the ranks that have not entered the one that a rank is in."""
        seconds, last = self._trace.seconds, self._trace.last()
        if waits is not None and place is not None:
            seconds, last = place["seconds"], entered(place)
        if seconds is None or seconds < LATE_SECONDS or last in self._reported:
            return
        self._reported.add(last)
        rank, line = late[0]
        who = "waiting" if waits is None else f"rank {waits} has been waiting"
        more = f" and {len(late) - 1} more" if len(late) > 1 else ""
        where = "it does not answer" if line is None else f"it is at {line or 'no line of the script'}"
        log.warning("%s %.0f s for rank %d%s, which has not %s; %s", who, seconds, rank, more, last, where)

    def _postpone(self, seconds: float) -> None:
        self.due = time.monotonic() + min(max(ASK_SECONDS, seconds / 2), _LONGEST_PAUSE)
