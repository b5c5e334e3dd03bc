"""Named volumes on a machine that mounts nothing for its jobs: where their data is, and whether it can be read."""

from __future__ import annotations

import functools
import os
import time
from typing import TYPE_CHECKING

from paceline.job.errors import UserError, nearest
from paceline.job.job import Volume
from paceline.job.settings_files import PROJECT_FILE, user_file
from paceline.job.text import printable
from paceline.node.machine import volumes as node_volumes
from paceline.node.readers import Begun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.contract.messages import VolumeLook
    from paceline.contract.records import DataRecord
    from paceline.job.settings import Settings
    from paceline.job.spec import Mount

PATIENCE = 5.0  # seconds that a file system has to answer


def volumes(settings: Settings) -> list[Volume]:
    """All volumes of the settings, by name; all are examined at the same time."""
    looks = _looks(dict(sorted(settings.volumes.items())))
    return [
        Volume(
            name, settings.volumes[name], look["problem"], str(settings.file_of("volumes", name)), look["size"],
            look["free"],
        )
        for name, look in looks.items()
    ]  # fmt: skip


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
    paths = {source["volume"]: source["path"] for source in found}
    for name, look in _looks(paths).items():
        if look["problem"] is not None:
            file = settings.file_of("volumes", name)
            raise UserError(printable(f"volume {name}, {paths[name]}: {look['problem']}; correct it in {file}"))
    return tuple(node_volumes.placed(source, root, working_dir) for source in found)


def _looks(paths: Mapping[str, str]) -> dict[str, VolumeLook]:
    """What trying to read each of these folders and files finds, at once: a network file system may never answer."""
    begun = {name: Begun(functools.partial(node_volumes.look, path)) for name, path in paths.items()}
    until = time.monotonic() + PATIENCE
    found: dict[str, VolumeLook] = {}
    for name, look in begun.items():
        try:
            found[name] = look.result(until - time.monotonic())
        except TimeoutError:
            found[name] = {"problem": f"no answer within {PATIENCE:g} s", "size": None, "free": None}
    return found
