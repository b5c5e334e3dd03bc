"""Named volumes on a machine that mounts nothing for its jobs: where their data is, and whether it can be read."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from paceline.job.errors import UserError, nearest
from paceline.job.job import Volume
from paceline.job.settings_files import PROJECT_FILE, user_file
from paceline.job.text import printable
from paceline.node.machine import volumes as node_volumes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.contract.records import DataRecord
    from paceline.job.settings import Settings
    from paceline.job.spec import Mount

PATIENCE = 5.0  # seconds that a file system has to answer


def volumes(settings: Settings) -> list[Volume]:
    """All volumes of the settings, by name; all are examined at the same time."""
    looks = {name: _Look(path) for name, path in sorted(settings.volumes.items())}
    for look in looks.values():
        look.wait()
    return [
        Volume(name, look.path, look.problem, str(settings.file_of("volumes", name)), look.size, look.free)
        for name, look in looks.items()
    ]


def check(mounts: Sequence[Mount], settings: Settings) -> dict[str, str]:
    """Name → path of a job's volumes, from the settings; does not look at the paths."""
    variables: dict[str, str] = {}
    wanted: dict[str, str] = {}
    for mount in mounts:
        if mount.volume not in settings.volumes:
            where = f"volumes are defined under [volumes] in {PROJECT_FILE} or {user_file()}"
            hint = nearest(mount.volume, settings.volumes) if settings.volumes else ""
            link = "; " if hint and not hint.endswith("?") else " " if hint else ""
            raise UserError(printable(f"no volume {mount.volume!r}; {hint}{link}{where}"))
        for taken, key in ((variables, mount.variable), (wanted, os.path.normpath(mount.path))):
            other = taken.setdefault(key, mount.volume)
            if other != mount.volume:
                raise UserError(
                    printable(f"volumes {other} and {mount.volume} would share {key}; rename or leave out one")
                )
    return {name: settings.volumes[name] for name in variables.values()}


def sources(mounts: Sequence[Mount], settings: Settings) -> tuple[DataRecord, ...]:
    """A job's volumes in a request: volume, path, wanted (where the job wants it), variable (with the path)."""
    paths = check(mounts, settings)
    return tuple(
        {"volume": m.volume, "path": paths[m.volume], "wanted": m.path, "variable": m.variable} for m in mounts
    )


def find(mounts: Sequence[Mount], settings: Settings, root: str, working_dir: str) -> tuple[DataRecord, ...]:
    """The same for a job on this machine, with what `node.machine.volumes.find` adds."""
    found = sources(mounts, settings)
    looks = {source["volume"]: _Look(source["path"]) for source in found}
    for name, look in looks.items():
        look.wait()
        if look.problem is not None:
            file = settings.file_of("volumes", name)
            raise UserError(printable(f"volume {name}, {look.path}: {look.problem}; correct it in {file}"))
    return tuple(node_volumes.placed(source, root, working_dir) for source in found)


class _Look:
    """Tries to read a folder or file in its own thread, because a network file system may never answer."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.problem: str | None = None
        self.size: int | None = None
        self.free: int | None = None
        self._answered = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def wait(self) -> None:
        """Wait for the answer, at most `PATIENCE` seconds."""
        if not self._answered.wait(PATIENCE):
            self.problem = f"no answer within {PATIENCE:g} s"

    def _look(self) -> None:
        found = node_volumes.look(self.path)
        self.problem, self.size, self.free = found["problem"] or self.problem, found["size"], found["free"]
        self._answered.set()
