"""Which jobs were submitted from here to other machines, so that they are listed while their hosts do not answer."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline.node.files import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from paceline.job.job import Job


class SubmittedJobs:
    """The jobs of one target: a folder with one file per job."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, job: Job, hosts: Sequence[str]) -> None:
        """Remember a job and its hosts. If the folder cannot be written to, it is not remembered."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(self._folder / job.name, {"hosts": list(hosts), "record": asdict(job)})

    def forget(self, name: str) -> None:
        """Drop a job; a file that `add` did not write stays."""
        path = self._folder / name
        if (read_json(path) or {}).keys() == {"hosts", "record"}:
            with contextlib.suppress(OSError):
                path.unlink()

    def on(self, hosts: Collection[str]) -> dict[str, tuple[list[str], dict[str, Any]]]:
        """Name → hosts and record of the jobs that have a part on one of these hosts."""
        found = {}
        try:
            files = [path for path in self._folder.iterdir() if not path.name.startswith(".")]
        except OSError:
            return {}
        for path in files:
            stored = read_json(path)
            with contextlib.suppress(KeyError, TypeError):  # a damaged file is no job
                if stored is not None and not set(hosts).isdisjoint(stored["hosts"]):
                    found[path.name] = (list(stored["hosts"]), dict(stored["record"]))
        return found
