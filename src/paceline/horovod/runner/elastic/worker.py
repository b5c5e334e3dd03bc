"""What an elastic state is told about hosts."""

from paceline.horovod.common.elastic import HostUpdateResult

__all__ = ["HostUpdateResult"]
