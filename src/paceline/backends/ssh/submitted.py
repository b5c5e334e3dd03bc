"""Which jobs were submitted from here to other machines, so that they are listed while their hosts do not answer."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline.node.files import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from paceline.job.job import Job


class SubmittedJobs:
    """The jobs of one target: a folder with one file per job."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, job: Job, hosts: Sequence[str], options: Mapping[str, Any] | None = None) -> None:
        """Remember a job and its hosts. If the folder cannot be written to, it is not remembered."""
        note = {"hosts": list(hosts), "record": asdict(job), **({"options": dict(options)} if options else {})}
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(self._folder / job.name, note)

    def join(self, name: str, hosts: Sequence[str]) -> None:
        """Remember that these hosts have a part of a job now, too, if it was submitted from here."""
        stored = read_json(self._folder / name) or {}
        with contextlib.suppress(KeyError, TypeError, OSError):
            more = [host for host in hosts if host not in stored["hosts"]]
            write_json(self._folder / name, {**stored, "hosts": [*stored["hosts"], *more]})

    def has_ended(self, job: Job) -> None:
        """Remember how a job ended, so that its hosts are not asked for ever."""
        stored = read_json(self._folder / job.name) or {}
        with contextlib.suppress(KeyError, TypeError, OSError):
            if stored["record"]["created"] == job.created and stored["record"]["state"] != job.state:
                write_json(self._folder / job.name, {**stored, "record": asdict(job)})

    def is_gone(self, name: str, hosts: Collection[str]) -> None:
        """Drop a job that these hosts do not have, if it was on no others."""
        stored = read_json(self._folder / name) or {}
        if stored and set(stored.get("hosts", ("",))) <= set(hosts):
            self.forget(name)

    def forget(self, name: str) -> None:
        """Drop a job; a file that `add` did not write stays."""
        path = self._folder / name
        if (read_json(path) or {}).keys() - {"options"} == {"hosts", "record"}:
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
