"""`paceline schema`: the keys of a job file, for editors."""

from __future__ import annotations

import json

import click


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
def schema() -> None:
    """Print the JSON schema of job files.

    Editors complete and check job files with it; a file that begins with this line finds it itself:

    # yaml-language-server: $schema=job.schema.json
    """
    from paceline.job.spec import JobSpec

    draft = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    click.echo(json.dumps({**draft, **JobSpec.model_json_schema()}, indent=2))
