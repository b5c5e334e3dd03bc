"""The folders of all Slurm jobs below paceline's root: found, made, and removed."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING

from paceline.node.errors import Refused
from paceline.node.files import list_names
from paceline.node.rundir.directory import MARKER, RunDirectory
from paceline.node.rundir.staging import remove_folder

from .job_folder import JobFolder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_BUILDING = ".new"  # ends the name of a folder that is being made
_ABANDONED = 3600.0  # seconds after which one has been left by a client that was ended
_REFRESH = 300.0  # seconds between two signs of a client that still fills one


class Jobs:
    """The folders of jobs below paceline's root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / "slurm"

    def __iter__(self) -> Iterator[JobFolder]:
        return (JobFolder(self.path / name) for name in list_names(self.path) if not name.startswith("."))

    def find(self, name: str) -> JobFolder | None:
        """The job of this name."""
        folder = JobFolder(self.path / name)
        return folder if not name.startswith(".") and "/" not in name and (folder.path / MARKER).exists() else None

    def named(self, chosen: Iterable[str]) -> list[JobFolder]:
        """Those of these jobs that are here."""
        return [folder for name in chosen if (folder := self.find(name)) is not None]

    def of(self, name: str) -> JobFolder:
        """The job of this name."""
        found = self.find(name)
        if found is None:
            raise Refused(f"no job {name}")
        return found

    def new(self, name: str) -> JobFolder:
        """A folder to fill for a new job; it becomes the job by `settle`."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.path / f".{name}.{os.uname().nodename}.{os.getpid()}{_BUILDING}" / name
        path.mkdir(mode=0o700, parents=True)
        RunDirectory(path).mark()
        return JobFolder(path)

    def settle(self, building: JobFolder) -> JobFolder | None:
        """Give a new folder its place; None if there is a job of its name already."""
        place = self.path / building.name
        try:
            os.rename(building.path, place)  # fails if the other folder has files, and each has
        except OSError:
            if os.path.lexists(place):
                return None
            raise
        self.discard(building)
        return JobFolder(place)

    @contextlib.contextmanager
    def filling(self, building: JobFolder) -> Iterator[None]:
        """While a new folder is filled, or an old one emptied, which may take long, it does not count as left."""
        is_filled = threading.Event()

        def show() -> None:
            while not is_filled.wait(_REFRESH):
                with contextlib.suppress(OSError):
                    os.utime(building.path.parent)

        threading.Thread(target=show, daemon=True).start()
        try:
            yield
        finally:
            is_filled.set()

    def sweep(self) -> None:
        """Remove what clients have left that were ended while they made or removed a job."""
        abandoned = [name for name in list_names(self.path) if name.startswith(".") and name.endswith(_BUILDING)]
        now = disk_time(self.root) if abandoned else 0.0
        for name in abandoned:
            path = self.path / name
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > _ABANDONED:
                    for inner in list_names(path):
                        remove_folder(path / inner)
                    path.rmdir()

    def discard(self, building: JobFolder) -> None:
        """Remove a folder that did not become a job, or what is left of it."""
        remove_folder(building.path)
        with contextlib.suppress(OSError):
            building.path.parent.rmdir()

    def remove(self, folder: JobFolder) -> None:
        """Remove a job: first its name, in one step, then its files."""
        hidden = self.path / f".{folder.name}.{os.uname().nodename}.{os.getpid()}{_BUILDING}"
        try:
            hidden.mkdir(mode=0o700, exist_ok=True)
            os.rename(folder.path, hidden / folder.name)
        except FileNotFoundError:
            return
        except OSError as error:
            raise Refused(f"cannot remove {folder.path}: {error.strerror}; remove it by hand") from None
        with self.filling(JobFolder(hidden / folder.name)):
            is_removed = remove_folder(hidden / folder.name)
        if not is_removed:
            raise Refused(f"cannot remove all of {hidden}; remove it by hand")
        with contextlib.suppress(OSError):
            hidden.rmdir()


def disk_time(root: Path) -> float:
    """What time it is by the clock that gives the files below a root their times."""
    clock = root / ".clock"
    try:
        clock.touch(mode=0o600)
        return clock.stat().st_mtime
    except OSError:  # nothing can be written now
        return time.time()
