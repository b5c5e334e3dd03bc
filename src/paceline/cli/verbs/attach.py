"""The verbs for one job: `events`, and `attach`, which runs a command in the environment of a rank."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import click

from paceline.backends.stands import in_words, stood
from paceline.backends.story import story
from paceline.cli.flags.options import SectionedCommand
from paceline.cli.flags.selection import failed, known, rank_of
from paceline.cli.flags.where import OF_JOBS, backend, where_options
from paceline.cli.terminal.ending import ended_by_signals
from paceline.cli.terminal.tables import Column, output_option, show
from paceline.job.errors import UserError
from paceline.job.quantities import duration_text, show_time

_MOST_DEPTH = 3  # nested lists that are shown


@click.command(cls=SectionedCommand, params=[*where_options(), output_option()])
@click.argument("name", metavar="JOB", **OF_JOBS)
def events(name: str, output: str) -> int:
    """Show what happened to JOB, in order: its way through queues, attempts and why they ended, checkpoints, stops."""
    (job,) = known([name], warns=True)
    with ended_by_signals():
        happened = story(job, backend().events(name))
    show(happened, _EVENTS, output, lambda event: {**event, "time": show_time(event["time"])})
    return 0


def _details(event: dict[str, Any]) -> str:
    if event["event"] == "hang":
        return str(event["why"])
    if event["event"] == "stood":
        return "; ".join(map(stood, event["places"]))
    if event["event"] == "spent":
        return in_words(event["spent"])
    left_out = ("time", "event", "host", "logs", "failure", "others")
    shown = dict(event)
    if "signal" in event:
        shown["signal"] = signal.Signals(event["signal"]).name
    if event.get("grace") is not None:
        shown["grace"] = duration_text(event["grace"])
    parts = [
        f"{key}={_value(value)}" for key, value in shown.items() if key not in left_out and value not in (None, "", [])
    ]
    failure = event.get("failure")
    return " ".join([*([f"failure: {failed(failure)};"] if failure else []), *parts])


def _value(value: Any, depth: int = 0) -> str:
    """A detail in a readable form: `0,1`, `true`, `"no node"`."""
    if isinstance(value, (list, tuple, dict)) and depth >= _MOST_DEPTH:
        return "…"
    if isinstance(value, (list, tuple)):
        return ",".join(_value(inner, depth + 1) for inner in value)
    if isinstance(value, dict):
        return ",".join(f"{key}:{_value(inner, depth + 1)}" for key, inner in value.items())
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False) if " " in value else value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


_EVENTS: list[Column[dict[str, Any]]] = [
    Column("TIME", lambda event: show_time(event["time"])),
    Column("HOST", lambda event: event.get("host"), is_optional=True),  # of jobs with several
    Column("EVENT", lambda event: event["event"]),
    Column("DETAILS", _details, wraps=True, least=40),
]


@click.command(cls=SectionedCommand, params=where_options(), context_settings={"ignore_unknown_options": True})
@click.argument("name", metavar="JOB", **OF_JOBS)
@click.option(
    "-i", "--instance", metavar="INSTANCE|RANK", default="0", help="The rank whose variables to use.  [default: 0]"
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] [COMMAND]…")
def attach(name: str, instance: str, command: tuple[str, ...]) -> int:
    """Run COMMAND, or a shell, where a rank of JOB runs: in its folder, with its variables and devices."""
    (job,) = known([name])
    rank = rank_of(job, instance)
    has_terminal = sys.stdin.isatty()
    how = backend().shell(name, rank, command, terminal=has_terminal)
    if not command and has_terminal:
        click.echo(
            f"paceline: a shell where rank {rank} of job {name} runs, in {job.working_dir}; leave it with exit",
            err=True,
        )
    try:
        os.chdir(how.folder)
    except OSError as error:
        raise UserError(f"cannot change to {how.folder}: {error.strerror}; check that it still exists") from None
    try:
        os.execvpe(how.command[0], how.command, how.env)
    except OSError as error:
        raise UserError(f"cannot run {how.command[0]}: {error.strerror}; check the name") from None
