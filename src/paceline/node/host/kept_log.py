"""A second copy of a container's output, on a volume, where it is when the container is gone.

Each line begins with its time, as in the log of the container that a cluster keeps. The names of the files say when
each container began, and those of empty ones how often the job was restarted.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

_RESTARTS = "restarts-"  # begins the name of a file, followed by their number


def before(folder: str | None) -> tuple[int, float | None]:
    """How many restarts other containers of the job have noted, and when the first of them began, if there was one."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(folder) if folder is not None else []
    restarts = [int(name[len(_RESTARTS) :]) for name in names if re.fullmatch(_RESTARTS + r"\d+", name)]
    begun = [int(found[1]) for name in names if (found := re.fullmatch(r"node-\d+-(\d+)\.log", name))]
    return max(restarts, default=0), min(begun) / 1e9 if begun else None


class KeptLog:
    """Writes lines to a file of its own in a folder. If that cannot be written, it says so once, and stops."""

    def __init__(self, folder: str | None, node_rank: int) -> None:
        """Make the file."""
        self._file = -1
        self._folder = folder
        if folder is None:
            return
        path = Path(folder, f"node-{node_rank}-{time.time_ns()}.log")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError as error:
            _warn(path, error)

    def write(self, text: bytes) -> None:
        """Write whole lines, with the time of now."""
        if self._file < 0:
            return
        stamp = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ ").encode()
        data = b"".join(stamp + line for line in text.splitlines(keepends=True))
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            _warn(Path(os.readlink(f"/proc/self/fd/{self._file}")), error)
            self.close()

    def note_restarts(self, count: int) -> None:
        """Note how many restarts the job had, for a container that comes when all agents are gone."""
        if self._file >= 0 and self._folder is not None:
            with contextlib.suppress(OSError):
                Path(self._folder, f"{_RESTARTS}{count}").touch()

    def close(self) -> None:
        """Write no more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _warn(path: Path, error: OSError) -> None:
    print(f"paceline: no copy of the logs is kept in {path}: {error.strerror}", file=sys.stderr, flush=True)
