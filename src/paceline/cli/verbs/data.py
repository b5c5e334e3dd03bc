"""`paceline data`: the named volumes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

import click

from paceline.backends.base import Volumes, able
from paceline.backends.everywhere import Place, ask
from paceline.cli.flags.option import SectionedCommand, output_option
from paceline.cli.flags.selection import places
from paceline.cli.flags.where import backend, where_options
from paceline.cli.terminal.tables import Column, if_known, show
from paceline.cli.terminal.write import say, say_once
from paceline.job.quantities import show_size
from paceline.job.shown import ago

if TYPE_CHECKING:
    from paceline.job.job import Volume


class _Row(NamedTuple):
    volume: Volume
    target: str  # "" if there is only one


@click.group()
def data() -> None:
    """List the named volumes that jobs can use with --data NAME:/PATH.

    They are defined under [volumes] in ~/.config/paceline/config.toml and in the project's paceline.toml; a
    cluster has volumes of its own.
    """


def _list(output: str) -> None:
    """List the volumes, and whether they can be read here."""

    def look(place: Place) -> list[_Row]:
        there = able(place.load(), Volumes)
        return [_Row(volume, place.name) for volume in there.volumes(say_once)]

    answers, missing = ask(places(), look, "its volumes are not shown")
    for line in missing:
        say_once(line)
    rows = [row for _, found in answers for row in found]
    are_claims = any(row.volume.access for row in rows)  # of a cluster: their size is what they were made for
    columns: list[Column[_Row]] = [
        Column("NAME", lambda row: row.volume.name),
        Column("TARGET", lambda row: row.target or None, is_optional=True, keep=4),
        Column("PATH", lambda row: row.volume.path or None, is_text=True, least=24, keep=2),
        Column("ACCESS", lambda row: ",".join(row.volume.access) or None, is_optional=True, keep=3),
        Column("SIZE", lambda row: if_known(show_size, row.volume.size), is_optional=True, wide=not are_claims),
        Column("FREE", lambda row: if_known(show_size, row.volume.free), is_optional=True, wide=True),
        Column("OWNER", lambda row: row.volume.owner, is_optional=True),
        Column("AGE", lambda row: if_known(ago, row.volume.created), is_optional=True),
        Column("READABLE", lambda row: "yes" if row.volume.problem is None else f"no: {row.volume.problem}",
               is_text=True, keep=5),
        Column("DEFINED IN", lambda row: row.volume.file, is_text=True, is_optional=bool(rows), wide=True),
    ]  # fmt: skip
    show(rows, columns, output, lambda row: {**asdict(row.volume), "target": row.target or backend().name})
    if not rows:
        from paceline.job.settings_files import PROJECT_FILE, user_file

        say(f"no volumes; define them under [volumes] in {PROJECT_FILE} or {user_file()}")


data.add_command(SectionedCommand("list", callback=_list, params=[*where_options(), output_option()]))
