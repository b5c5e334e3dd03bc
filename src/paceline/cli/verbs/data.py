"""`paceline data`: the named volumes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from paceline.backends.base import Volumes, able
from paceline.cli.flags.options import SectionedCommand
from paceline.cli.flags.selection import warn
from paceline.cli.flags.where import backend, where_options
from paceline.cli.terminal.tables import Column, output_option, show

if TYPE_CHECKING:
    from paceline.job.job import Volume


@click.group()
def data() -> None:
    """The named volumes that jobs can use with --data NAME:/PATH.

    They are defined under [volumes] in ~/.config/paceline/config.toml and in the project's paceline.toml; a
    cluster has volumes of its own.
    """


def _list(output: str) -> None:
    """List the volumes, and whether they can be read here."""
    import time

    from paceline.job.quantities import show_duration, show_size

    def size(number: int | None) -> str | None:
        return None if number is None else show_size(number)

    def age(volume: Volume) -> str | None:
        return None if volume.created is None else show_duration(max(0.0, time.time() - volume.created))

    columns: list[Column[Volume]] = [
        Column("NAME", lambda volume: volume.name),
        Column("PATH", lambda volume: volume.path, is_text=True),
        Column("READABLE", lambda volume: "yes" if volume.problem is None else f"no: {volume.problem}", is_text=True),
        Column("DEFINED IN", lambda volume: volume.file, is_text=True),
        Column("SIZE", lambda volume: size(volume.size), wide=True),
        Column("FREE", lambda volume: size(volume.free), wide=True),
    ]
    volumes = able(backend(), Volumes).volumes(warn)
    if any(volume.access for volume in volumes):  # they belong to a cluster, not to settings
        columns = [
            Column("NAME", lambda volume: volume.name),
            Column("ACCESS", lambda volume: ",".join(volume.access) or None),
            Column("SIZE", lambda volume: size(volume.size)),
            Column("OWNER", lambda volume: volume.owner),
            Column("AGE", age),
            Column(
                "READABLE", lambda volume: "yes" if volume.problem is None else f"no: {volume.problem}", is_text=True
            ),
            Column("VOLUME", lambda volume: volume.path or None, wide=True, is_text=True),
        ]
    show(volumes, columns, output, asdict)
    if not volumes:
        from paceline.job.settings_files import PROJECT_FILE, user_file

        where = f"{PROJECT_FILE} or {user_file()}"
        click.echo(f"paceline: no volumes; define them under [volumes] in {where}", err=True)


data.add_command(
    SectionedCommand("list", callback=_list, help=_list.__doc__, params=[*where_options(), output_option()])
)
