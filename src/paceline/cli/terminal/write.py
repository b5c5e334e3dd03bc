"""Writing what ranks wrote: bytes, unchanged."""

from __future__ import annotations

import os
import select


def write(target: int, data: bytes) -> None:
    """Write all of `data` to a descriptor."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:  # the parent process made it non-blocking
            select.select([], [target], [])
