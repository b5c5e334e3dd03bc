"""`paceline scaleout` and `paceline scalein`: more hosts, or fewer, for a job that runs."""

from __future__ import annotations

import click

from paceline.cli.flags.names import known
from paceline.cli.flags.where import backend, where_options


@click.command(params=where_options())
@click.argument("job", metavar="JOB")
@click.argument("names", nargs=-1, metavar="[HOST]…")
def scaleout(job: str, names: tuple[str, ...]) -> int:
    """Have HOSTs take part in JOB, which was started with --nnodes MIN:MAX; by default all that do not yet, up to MAX.

    Its ranks start again with them, from the last checkpoint.
    """
    known([job])
    added = backend().add(job, names)
    what = f"{', '.join(added)} come{'s' if len(added) == 1 else ''} in" if added else "no other host can come in"
    click.echo(f"paceline: job {job}: {what}", err=True)
    return 0


@click.command(params=where_options())
@click.argument("job", metavar="JOB")
@click.argument("names", nargs=-1, required=True, metavar="HOST…")
def scalein(job: str, names: tuple[str, ...]) -> int:
    """Have HOSTs leave JOB, which goes on without them from the last checkpoint."""
    known([job])
    backend().leave(job, names)
    click.echo(f"paceline: job {job}: {', '.join(names)} leave{'s' if len(names) == 1 else ''}", err=True)
    return 0
