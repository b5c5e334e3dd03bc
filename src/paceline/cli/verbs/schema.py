"""`paceline schema`: the keys of a job file, for editors."""

from __future__ import annotations

import json

import click

from paceline.cli.flags.options import SectionedCommand


@click.command(cls=SectionedCommand)
def schema() -> None:
    """Print the JSON schema of job files.

    Editors complete and check job files with it; a file that begins with this line finds it itself:

    # yaml-language-server: $schema=job.schema.json
    """
    from paceline.job.spec import JobSpec

    click.echo(json.dumps(JobSpec.schema(), indent=2))
