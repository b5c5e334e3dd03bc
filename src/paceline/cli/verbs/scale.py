"""`paceline scaleout` and `paceline scalein`: add nodes to a running job, or remove them."""

from __future__ import annotations

import click

from paceline.backends.base import Elastic, able
from paceline.cli.flags.options import SectionedCommand
from paceline.cli.flags.selection import known
from paceline.cli.flags.where import OF_JOBS, backend, where_options
from paceline.cli.terminal.write import say
from paceline.job.errors import UserError


def _asked(names: tuple[str, ...], count: int | None) -> tuple[str, ...] | int | None:
    """The hosts that the command line names, or the number of nodes; None if it gives neither."""
    if names and count is not None:
        raise UserError("--nnodes and HOST exclude each other; give one of them")
    return names or count


@click.command(cls=SectionedCommand, params=where_options())
@click.argument("job", metavar="JOB", **OF_JOBS)
@click.argument("names", nargs=-1, metavar="[HOST]…")
@click.option("--nnodes", type=click.IntRange(1), metavar="N", help="Add any N hosts.")
def scaleout(job: str, names: tuple[str, ...], nnodes: int | None) -> int:
    """Add HOSTs to JOB, which was started with --nnodes MIN:MAX; by default all that are not in it, up to MAX.

    Its ranks start again on all hosts, from the last checkpoint.
    """
    more = _asked(names, nnodes)
    known([job])
    here = able(backend(), Elastic)
    added = here.scaleout(job, more)
    what = f"{', '.join(added)} join{'s' if len(added) == 1 else ''}" if added else "no other host can join"
    say(f"job {job}: {what}")
    return 0


@click.command(cls=SectionedCommand, params=where_options())
@click.argument("job", metavar="JOB", **OF_JOBS)
@click.argument("names", nargs=-1, metavar="[HOST]…")
@click.option("--nnodes", type=click.IntRange(1), metavar="N", help="Remove any N hosts.")
def scalein(job: str, names: tuple[str, ...], nnodes: int | None) -> int:
    """Remove HOSTs from JOB, which continues without them from the last checkpoint."""
    fewer = _asked(names, nnodes)
    if fewer is None:
        raise UserError("scalein: no host to remove is given; name HOSTs, or give --nnodes")
    known([job])
    here = able(backend(), Elastic)
    leaving = here.scalein(job, fewer)
    click.echo(f"paceline: job {job}: {', '.join(leaving)} leave{'s' if len(leaving) == 1 else ''}", err=True)
    return 0
