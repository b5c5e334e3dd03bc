"""The verbs for one job: `events`, and `attach`, which runs a command in the environment of a rank."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from paceline.backends.story import details, story
from paceline.cli.flags import completion
from paceline.cli.flags.option import SectionedCommand, output_option
from paceline.cli.flags.selection import known, rank_of
from paceline.cli.flags.where import OF_JOBS, backend, where_options
from paceline.cli.terminal.tables import Column, show
from paceline.cli.terminal.write import ended_by_signals, say
from paceline.job.errors import UserError
from paceline.job.quantities import show_time

if TYPE_CHECKING:
    from paceline.contract.records import EventRecord


@click.command(cls=SectionedCommand, params=[*where_options(), output_option()])
@click.argument("name", metavar="JOB", **OF_JOBS)
def events(name: str, output: str) -> int:
    """Show what happened to JOB, in order: its way through queues, attempts and why they ended, checkpoints, stops."""
    (job,) = known([name], warns=True)
    with ended_by_signals():
        happened = story(job, backend().events(name))
    show(happened, _EVENTS, output, lambda event: {**event, "time": show_time(event["time"])})
    return 0


_EVENTS: list[Column[EventRecord]] = [
    Column("TIME", lambda event: show_time(event["time"])),
    Column("HOST", lambda event: event.get("host"), is_optional=True),  # of jobs with several
    Column("EVENT", lambda event: event["event"]),
    Column("DETAILS", details, is_text=True, wraps=True, least=40),
]


@click.command(cls=SectionedCommand, params=where_options(), context_settings={"ignore_unknown_options": True})
@click.argument("name", metavar="JOB", **OF_JOBS)
@click.option(
    "-i",
    "--instance",
    metavar="INSTANCE|RANK",
    default="0",
    shell_complete=completion.instances,
    help="The rank whose variables to use.  [default: 0]",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] [COMMAND]…")
def attach(name: str, instance: str, command: tuple[str, ...]) -> int:
    """Run COMMAND, or a shell, where a rank of JOB runs: in its folder, with its variables and devices."""
    (job,) = known([name])
    rank = rank_of(job, instance)
    has_terminal = sys.stdin.isatty()
    how = backend().shell(name, rank, command, terminal=has_terminal)
    if not command and has_terminal:
        say(f"a shell where rank {rank} of job {name} runs, in {job.working_dir}; leave it with exit")
    try:
        os.chdir(how.folder)
    except OSError as error:
        raise UserError(f"cannot change to {how.folder}: {error.strerror}; check that it still exists") from None
    try:
        os.execvpe(how.command[0], how.command, how.env)
    except OSError as error:
        raise UserError(f"cannot run {how.command[0]}: {error.strerror}; check the name") from None
