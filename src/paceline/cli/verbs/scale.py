"""`paceline scaleout` and `paceline scalein`: more nodes, or fewer, for a job that runs."""

from __future__ import annotations

import click

from paceline.backends.base import Elastic, able
from paceline.cli.flags.names import known
from paceline.cli.flags.where import backend, remember_jobs, where_options
from paceline.job.errors import UserError


def _asked(names: tuple[str, ...], count: int | None) -> tuple[str, ...] | int | None:
    """The hosts that the command line names, or how many nodes; None where it says neither.

    Raises:
        UserError: it says both.
    """
    if names and count is not None:
        raise UserError("--nnodes says how many, HOST which; give one of them")
    return names or count


@click.command(params=where_options())
@click.argument("job", metavar="JOB", callback=remember_jobs)
@click.argument("names", nargs=-1, metavar="[HOST]…")
@click.option("--nnodes", type=click.IntRange(1), metavar="N", help="So many more, whichever they are.")
def scaleout(job: str, names: tuple[str, ...], nnodes: int | None) -> int:
    """Have HOSTs take part in JOB, which was started with --nnodes MIN:MAX; by default all that do not yet, up to MAX.

    Its ranks start again with them, from the last checkpoint.
    """
    more = _asked(names, nnodes)
    here = able(backend(), Elastic)
    known([job])
    added = here.scaleout(job, more)
    what = f"{', '.join(added)} come{'s' if len(added) == 1 else ''} in" if added else "no other host can come in"
    click.echo(f"paceline: job {job}: {what}", err=True)
    return 0


@click.command(params=where_options())
@click.argument("job", metavar="JOB", callback=remember_jobs)
@click.argument("names", nargs=-1, metavar="[HOST]…")
@click.option("--nnodes", type=click.IntRange(1), metavar="N", help="So many, whichever they are.")
def scalein(job: str, names: tuple[str, ...], nnodes: int | None) -> int:
    """Have HOSTs leave JOB, which goes on without them from the last checkpoint."""
    fewer = _asked(names, nnodes)
    if fewer is None:
        raise UserError("scalein: nothing says who is to leave; name HOSTs, or give --nnodes")
    here = able(backend(), Elastic)
    known([job])
    left = here.scalein(job, fewer)
    click.echo(f"paceline: job {job}: {', '.join(left)} leave{'s' if len(left) == 1 else ''}", err=True)
    return 0
