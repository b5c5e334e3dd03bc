"""The verbs that wait for jobs, end them, and change their nodes."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import click

from paceline.backends.base import Elastic, Suspends, able
from paceline.cli.flags.option import SectionedCommand, Whole
from paceline.cli.flags.selection import how_to_resume, known, looked_again, outcome
from paceline.cli.flags.where import OF_JOBS, backend, where_options
from paceline.cli.terminal.progress_bar import ProgressLine
from paceline.cli.terminal.write import say
from paceline.job.errors import UserError
from paceline.job.job import Job
from paceline.job.text import a_few

from .show import _PATIENCE, _seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CLOCKS = 5.0  # seconds by which a host's clock may be behind
_PAUSES = (0.1, 2.0)  # seconds between two looks at whether jobs are suspended, at first and later


@click.command(cls=SectionedCommand, params=where_options())
@click.argument("names", nargs=-1, required=True, metavar="JOB…", **OF_JOBS)
@click.option("--timeout", metavar="10m", help="Give up after this time, with exit code 124.")
def wait(names: tuple[str, ...], timeout: str | None) -> int:
    """Wait until JOBs have ended; the exit code is that of the first one that failed."""
    seconds = _seconds("--timeout", timeout, "s")
    if seconds is not None:
        deadline = time.monotonic() + seconds
        backend().look_until(deadline)
    backend().keep_expired()  # how they ended is to be said
    jobs = known(names, warns=True)
    for job in jobs:
        if job.state == "SUSPENDED":
            say(f"job {job.name} is suspended; paceline resume{backend().where_of(job.name)} {job.name} lets it go on")
    backend().ask_on(say)
    in_time = wait_for(names, None if seconds is None else max(0.0, deadline - time.monotonic()))
    if not in_time and (going := [it.name for it in looked_again(jobs) if it is not None and not it.is_over]):
        say(f"{', '.join(going)} did not end within {timeout}")
        return 124
    code = 0
    for before, after in zip(jobs, looked_again(jobs), strict=True):
        if after is None:
            _say_gone(before)
            code = code or 1
            continue
        _say_outcome(after)
        code = code or _exit_code(after)
    return code


def wait_for(names: Sequence[str], seconds: float | None = None) -> bool:
    """Wait for jobs to end, and show that it goes on."""
    with ProgressLine() as progress:
        of = len(names) if len(names) > 1 else None
        return backend().wait(names, seconds, lambda ended: progress(f"waiting for {a_few(names)}", ended, of))


def _say_outcome(job: Job, more: str = "") -> None:
    """How a job ended, and how it goes on if it can."""
    say(outcome(job) + more)
    if (how := how_to_resume(job, backend().where_of(job.name))) is not None:
        say(how)


def _say_gone(job: Job) -> None:
    say(f"job {job.name} has been removed meanwhile; how it ended is not known")


def _exit_code(job: Job) -> int:
    """The exit code of a job that is over; 1 where it died without one."""
    return (0 if job.state == "SUCCEEDED" else 1) if job.exit_code is None else job.exit_code


@click.command(cls=SectionedCommand, params=where_options())
@click.argument("names", nargs=-1, required=True, metavar="JOB…", **OF_JOBS)
@click.option("--now", is_flag=True, help="Stop at once; nothing is saved.")
@click.option("--no-wait", is_flag=True, help="Return before they have ended.")
def stop(names: tuple[str, ...], now: bool, no_wait: bool) -> int:
    """Stop JOBs: cleanly, so that a script that uses the library saves a checkpoint."""
    names, here = tuple(dict.fromkeys(names)), backend()
    here.keep_expired()  # how they ended is to be said
    jobs = known(names)
    refuse_lost([job for job in jobs if job.state == "LOST" and not here.can_stop(job.name)])
    began = time.time()
    unreached = here.stop(names, now)
    if not no_wait:
        wait_for(names, _PATIENCE + (0 if now else max(job.grace for job in jobs)))
    code = 0
    for before, after in zip(jobs, looked_again(jobs), strict=True):
        if after is None:
            _say_gone(before)
            continue
        if not before.is_over:
            _say_what_was_suspended(before.name, began)
        but = f"; not reached everywhere: {unreached[before.name]}" if before.name in unreached else ""
        running = {rank.node: None for rank in after.instances if rank.state in ("STARTING", "RUNNING")}
        if before.is_over and not running:
            say(f"job {before.name} had ended already ({before.state.lower()})")
        elif after.is_over and not running:
            _say_outcome(after, but)
        elif no_wait:
            say(f"job {before.name} is being stopped; its ranks have {before.grace:g} s{but}")
        else:
            where = f" on {', '.join(running)}" if running and after.nodes > 1 else ""
            at_once = f"paceline stop{here.where_of(before.name)} --now {before.name}"
            say(f"job {before.name} does not end{where}; end it at once with: {at_once}{but}")
            code = 1
        code = 1 if but else code
    return code


def refuse_lost(jobs: Sequence[Job]) -> None:
    """Refuse jobs whose state cannot be known from here."""
    for job in jobs:
        if job.state == "LOST":
            end = f"paceline delete{backend().where_of(job.name)} --force {job.name}"
            raise UserError(f"job {job.name}: {job.error}; to give it up: {end}")


def _say_what_was_suspended(name: str, since: float) -> None:
    """Name the processes of a job that were continued to end it."""
    with contextlib.suppress(UserError):  # a host does not answer, or the job was deleted
        for event in backend().events(name):
            if event["event"] == "continued" and event["time"] >= since - _CLOCKS:
                on = f" on {event['host']}" if "host" in event else ""
                say(f"job {name}: its {event['what']} (pid {event['pid']}){on} was suspended; continued to end it")


@click.command(cls=SectionedCommand, params=where_options())
@click.argument("names", nargs=-1, required=True, metavar="JOB…", **OF_JOBS)
@click.option("--no-wait", is_flag=True, help="Return before they are suspended.")
def suspend(names: tuple[str, ...], no_wait: bool) -> int:
    """Suspend JOBs: they save a checkpoint, end their ranks and give their devices back, until `resume`."""
    jobs, here = _unended(names), able(backend(), Suspends)
    unreached = here.suspend([job.name for job in jobs])
    after = looked_again(jobs) if no_wait else _wait_while(jobs, lambda job: job.state != "SUSPENDED")
    code = 0
    for before, job in zip(jobs, after, strict=True):
        if job is None:
            _say_gone(before)
            code = 1
            continue
        but = f"; not reached everywhere: {unreached[job.name]}" if job.name in unreached else ""
        resume = f"paceline resume{backend().where_of(job.name)} {job.name} lets it go on"
        if job.state == "SUSPENDED":
            say(f"job {job.name} is suspended; {_saved(before, job)}; {resume}{but}")
        elif job.is_over:
            _say_outcome(job, but)
        elif no_wait:
            say(f"job {job.name} is being suspended; its ranks have {job.grace:g} s to save{but}")
        else:
            why = f"paceline why{backend().where_of(job.name)} {job.name}"
            say(f"job {job.name} is not suspended yet, but {job.state}; see {why}{but}")
            code = 1
        code = 1 if but else code
    return code


@click.command(cls=SectionedCommand, params=where_options())
@click.argument("names", nargs=-1, required=True, metavar="JOB…", **OF_JOBS)
def resume(names: tuple[str, ...]) -> int:
    """Let suspended JOBs go on from their last checkpoint, once they have their devices again."""
    jobs, here = _unended(names), able(backend(), Suspends)
    unreached = here.resume([job.name for job in jobs])  # also of those that have not been suspended yet
    code = 0
    for before, job in zip(jobs, _wait_while(jobs, lambda job: job.state == "SUSPENDED"), strict=True):
        if job is None:
            _say_gone(before)
            code = 1
            continue
        but = f"; not reached everywhere: {unreached[job.name]}" if job.name in unreached else ""
        if job.state == "SUSPENDED":
            say(f"job {job.name} is still suspended; see paceline why{backend().where_of(job.name)} {job.name}{but}")
        elif job.is_over:
            _say_outcome(job, but)
        else:
            how = "goes on:" if before.state == "SUSPENDED" else "is not suspended; it is"
            say(f"job {job.name} {how} {job.state}{f', {job.waiting}' if job.waiting else ''}{but}")
        code = 1 if but or job.state == "SUSPENDED" else code
    return code


def _unended(names: Sequence[str]) -> list[Job]:
    """The jobs of these names; refuses those that have ended, or whose state is not known."""
    jobs = known(tuple(dict.fromkeys(names)))
    refuse_lost(jobs)
    for job in jobs:
        if job.is_over:
            again = f"paceline resubmit{backend().where_of(job.name)} {job.name}"
            raise UserError(f"job {job.name} has ended ({job.state}); {again} runs it again, from its last checkpoint")
    return jobs


def _wait_while(jobs: Sequence[Job], goes_on: Callable[[Job], bool]) -> list[Job | None]:
    """Look at jobs until none of them is so, at most as long as one that is stopped may take; see `looked_again`."""
    deadline, pause = time.monotonic() + _PATIENCE + max(job.grace for job in jobs), _PAUSES[0]
    while True:
        found = looked_again(jobs)
        if not any(it and goes_on(it) and not it.is_over for it in found) or time.monotonic() > deadline:
            return found
        time.sleep(pause)  # schedulers and hosts say nothing by themselves
        pause = min(2 * pause, _PAUSES[1])


def _saved(before: Job, job: Job) -> str:
    if job.checkpoint is not None:
        nothing_since = before.state == "RUNNING" and job.checkpoint == before.checkpoint
        return f"step {job.checkpoint['step']} is saved{', and nothing after it' if nothing_since else ''}"
    if before.checkpoint is not None:  # what its pods know goes with them
        return f"step {before.checkpoint['step']} or a later one is saved"
    if job.started is None:
        return "it had not begun"
    return "no checkpoint of the library is known, so it starts from the beginning unless its script loads its own"


# -- nodes -------------------------------------------------------------------------------------------------------------


def _asked(names: tuple[str, ...], count: int | None) -> tuple[str, ...] | int | None:
    """The hosts that the command line names, or the number of nodes; None if it gives neither."""
    if names and count is not None:
        raise UserError("--nnodes and HOST exclude each other; give one of them")
    return names or count


@click.command(cls=SectionedCommand, params=where_options())
@click.argument("job", metavar="JOB", **OF_JOBS)
@click.argument("names", nargs=-1, metavar="[HOST]…")
@click.option("--nnodes", type=Whole(1), metavar="N", help="Add any N hosts.")
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
@click.option("--nnodes", type=Whole(1), metavar="N", help="Remove any N hosts.")
def scalein(job: str, names: tuple[str, ...], nnodes: int | None) -> int:
    """Remove HOSTs from JOB, which continues without them from the last checkpoint."""
    fewer = _asked(names, nnodes)
    if fewer is None:
        raise UserError("scalein: no host to remove is given; name HOSTs, or give --nnodes")
    known([job])
    here = able(backend(), Elastic)
    leaving = here.scalein(job, fewer)
    say(f"job {job}: {', '.join(leaving)} leave{'s' if len(leaving) == 1 else ''}")
    return 0
