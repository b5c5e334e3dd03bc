"""`paceline submit`: jobs that outlive the terminal."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.flags.job import REST, SPEC, USUAL, Given
from paceline.cli.flags.option import UNDERSCORES, SectionedCommand
from paceline.cli.flags.where import backend_of_job, job_options
from paceline.cli.terminal.progress_bar import ProgressLine
from paceline.cli.terminal.write import ended_by_signals, say
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from paceline.backends.base import Backend, Prepared
    from paceline.job.spec import JobSpec


def _submit(**params: Any) -> int:
    """Submit a job that goes on without this terminal: SCRIPT with ARGS, or a YAML file that describes one.

    Flags take precedence over the file. `paceline get`, `logs -f`, `wait` and `stop` take the name that is printed.
    """
    from paceline.cli.flags.spec import say_what_is_exposed, say_what_means_nothing, spec_of

    spec, given = spec_of(Given(params), submit)
    say_what_means_nothing(given)
    say_what_is_exposed(spec)
    refuse_script(given)
    there = backend_of_job(given, spec)
    return dry_run(spec, there) if given.dry_run else detached(spec, there, verbose=given.verbose)


def refuse_script(given: Given) -> None:
    """Refuse --host-discovery-script, which only a job in the foreground can use."""
    if given.host_discovery_script is not None:
        raise UserError(
            "--host-discovery-script works with paceline run only; leave it out, and add hosts with paceline scaleout"
        )


def dry_run(spec: JobSpec, there: Backend, *, detached: bool = True) -> int:
    """Print what would be started, and whether its model fits into memory; start nothing."""
    from .plan import fits

    prepared = there.prepare(spec, detached=detached)
    click.echo(prepared.text())
    memory = fits(spec, prepared.spec, there)
    for line in filter(None, (*prepared.notes, prepared.installs, memory)):
        say(line)
    return 0


def detached(spec: JobSpec, there: Backend, *, verbose: bool = False) -> int:
    """Start the job, and say what to type next."""
    from paceline.cli.flags.spec import say_what_idles

    prepared = there.prepare(spec)
    say_what_idles(spec)
    return started(prepared, there, verbose=verbose)


def started(prepared: Prepared, there: Backend, *, verbose: bool = False) -> int:
    """Start a prepared job, and say what to type next; with `verbose`, also how its agents have started."""
    with ended_by_signals(), ProgressLine() as progress:
        job = there.start(prepared, progress)
    it = f"{there.where_of(job.name)} {job.name}".lstrip()
    with contextlib.suppress(OSError):  # the job runs, even if its name cannot be printed
        click.echo(job.name)
        click.echo(f"paceline: submitted; follow it with: paceline logs -f {it}", err=True)
        click.echo(f"paceline: see it with: paceline get {it}; stop it with: paceline stop {it}", err=True)
        if verbose:
            from paceline.cli.terminal.screen import how_it_started

            for line in how_it_started(there.events(job.name)):
                say(line)
    return 0


submit = SectionedCommand(
    "submit",
    callback=_submit,
    usual=USUAL,
    context_settings={"allow_interspersed_args": False, **UNDERSCORES},
    params=[*job_options(), *SPEC, *REST],
)
