"""How fast a folder gives what is written there, measured with a small file."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time

_BYTES = 8 << 20
_PIECE = 1 << 20


def read_rate(folder: str, seconds: float = 1.0) -> float | None:
    """Bytes per second that reading a file in `folder` gives, without the page cache; None if `seconds` are too few.

    The file has 8 MiB, and no name. A disk that hangs is not waited for.
    """
    found: list[float] = []

    def measure() -> None:
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:  # a full disk, or none
            for _ in range(_BYTES // _PIECE):
                file.write(bytes(_PIECE))
            file.flush()
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            begun = time.monotonic()
            file.seek(0)
            while file.read(_PIECE):
                pass
            found.append(_BYTES / max(time.monotonic() - begun, 1e-6))

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
