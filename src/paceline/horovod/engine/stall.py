"""Says which ranks have not submitted what others wait for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .negotiation import Negotiator
    from .variables import Settings

log = logging.getLogger("paceline")
_NAMED = 10  # operations that a warning names


class StallCheck:
    """When to look, and what has been reported."""

    def __init__(self, settings: Settings) -> None:
        limits = [limit for limit in (settings.stall_check, settings.stall_shutdown) if limit]
        self._settings = settings
        self._period = min(limits) / 2 if limits else 0.0
        self._next = 0.0
        self._named: set[str] = set()

    def next_look(self, negotiator: Negotiator) -> float | None:
        """Seconds until the next look; None while nothing waits for other ranks."""
        if not self._period or negotiator.is_idle:
            self._next = 0.0
            self._named.clear()
            return None
        now = negotiator.clock()
        if not self._next:
            negotiator.waiting(0.0)  # it notes since when
            self._next = now + self._period
        return self._next - now

    def look(self, negotiator: Negotiator) -> str:
        """Warn of what waits for long; returns why to shut down, or ""."""
        if not self._next or negotiator.clock() < self._next:
            return ""
        self._next = negotiator.clock() + self._period
        limit = self._settings.stall_shutdown
        late = negotiator.waiting(self._settings.stall_check or limit)
        new = [(name, missing) for name, _, missing in late if name not in self._named]
        if new and self._settings.stall_check:
            self._named.update(name for name, _ in new)
            listed = "; ".join(f"{name} [missing ranks: {', '.join(map(str, ranks))}]" for name, ranks in new[:_NAMED])
            more = f" and {len(new) - _NAMED} more" if len(new) > _NAMED else ""
            log.warning(
                "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are "
                "waiting for remainder of ranks for more than %g seconds. Stalled ops: %s%s",
                self._settings.stall_check,
                listed,
                more,
            )
        if limit:
            for name, took, missing in negotiator.waiting(limit):
                limits = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
                return f"{name} has waited {took:.0f} s for ranks {missing}, longer than {limits}"
        return ""
