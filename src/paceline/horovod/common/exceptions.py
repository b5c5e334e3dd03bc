"""The errors of the Horovod API."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective has failed: ranks disagree about it, a rank is gone, or Horovod was shut down while it waited."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts have come or gone, and training goes on after a new `init`.

    Attributes:
        skip_sync: whether the state need not be synchronised, because ranks were only removed.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts have changed")
        self.skip_sync = skip_sync


class NotInitialized(ValueError):
    """A query or an operation before `init`."""

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init().")
