"""The error of operations that have failed."""


class HorovodInternalError(RuntimeError):
    """A collective has failed: ranks disagree about it, a rank is gone, or Horovod was shut down while it waited."""
