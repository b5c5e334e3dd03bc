"""`paceline skill`: what a coding agent has to know to submit, watch and mend jobs."""

from __future__ import annotations

from importlib import resources

import click

from paceline.cli.flags.option import SectionedCommand


@click.command(cls=SectionedCommand)
def skill() -> None:
    """Print a SKILL.md for coding agents: how to submit jobs, watch them, find out what is wrong, and mend it.

    Most of them read it from a folder of skills: paceline skill > FOLDER/paceline/SKILL.md
    """
    click.echo(resources.files("paceline.cli").joinpath("SKILL.md").read_text(encoding="utf-8"), nl=False)
