"""The errors of the Horovod API."""

from __future__ import annotations

from paceline.horovod.engine.errors import HorovodInternalError

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "NotInitialized"]


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts have come or gone, and training goes on after a new `init`."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts have changed")
        self.skip_sync = skip_sync  # whether the state need not be synchronised, because ranks were only removed


class NotInitialized(ValueError):
    """A query or an operation before `init`."""

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init().")
