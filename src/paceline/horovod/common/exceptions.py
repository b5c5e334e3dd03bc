"""The errors of the Horovod API."""

from __future__ import annotations

from paceline.horovod.engine.errors import HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt", "NotInitialized"]


class HorovodVersionMismatchError(ImportError):
    """Horovod was built for another version of a framework; here, nothing is built, and it is never raised."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} has version {version}, and {installed_version} is installed")
        self.name, self.version, self.installed_version = name, version, installed_version


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts have come or gone, and training goes on after a new `init`."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts have changed")
        self.skip_sync = skip_sync  # whether the state need not be synchronised, because ranks were only removed


class NotInitialized(ValueError):
    """A query or an operation before `init`."""

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init().")
