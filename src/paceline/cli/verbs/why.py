"""`paceline why`: why a job failed, hangs or waits, with all that is known of it."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from paceline.backends.base import Recorded, Watched, able
from paceline.backends.story import story
from paceline.backends.why import RECENT, explained, use_in_words
from paceline.cli.flags.option import Option, SectionedCommand
from paceline.cli.flags.selection import known, runs
from paceline.cli.flags.where import OF_JOBS, backend, where_options
from paceline.cli.terminal.write import ended_by_signals
from paceline.job.errors import UserError
from paceline.job.quantities import replicas_in_words

if TYPE_CHECKING:
    from paceline.contract.records import NodeHistory
    from paceline.job.job import Job


def _why(name: str, live: bool, output: str) -> int:
    """Say why JOB failed, hangs or waits: the rank that is to blame, where it stands, and what is typical of that.

    With --live the ranks are asked now: each says in which collective it is, and where its threads are.
    """
    (job,) = known([name], warns=True)
    if live:
        runs(job, "leave --live out")
    with ended_by_signals():
        happened = story(job, backend().events(name))
        stands = able(backend(), Watched).stands(name) if live else None
        nodes = _used(job) if output == "text" else []
    if output == "json":
        found = {"state": job.state, "error": job.error, "events": happened, "stands": stands}
        click.echo(json.dumps(found, indent=2))
        return 0
    lines = explained(job, happened, stands)
    if len(lines) == 1 and not job.is_over and stands is None:
        lines.append("nothing is known that keeps it; see where its ranks are with --live")
    lines += replicas_in_words(job.progress)
    lines += (line for used in use_in_words(job, nodes) for line in ("", used))
    click.echo("\n".join(lines))
    return 0


def _used(job: Job) -> list[NodeHistory]:
    """What it has used, as far as that says why it is as it is."""
    there = backend()
    if not isinstance(there, Recorded) or (job.is_over and job.cause != "out of memory") or job.started is None:
        return []
    try:
        return there.history(job.name, 0.0 if job.is_over else time.time() - RECENT).nodes
    except UserError:
        return []


why = SectionedCommand(
    "why",
    callback=_why,
    params=[
        click.Argument(["name"], metavar="JOB", **OF_JOBS),
        *where_options(),
        Option(["--live"], section="What to show", is_flag=True, help="Ask the ranks where they are now."),
        Option(
            ["-o", "--output"], section="What to show", type=click.Choice(["text", "json"]), default="text",
            help="json: for programs, with all stacks.  [default: text]",
        ),
    ],
)  # fmt: skip
