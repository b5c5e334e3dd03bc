"""The verbs that look at jobs, wait for them and end them."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from paceline.job.errors import UserError, nearest
from paceline.job.job import STATES, Instance, Job
from paceline.job.quantities import duration, show_duration, show_time
from paceline.job.text import printable

from .hosts import backend, where_options
from .lookup import known, outcome, rank_of
from .output import STATE_COLOURS, Column, output_option, show, show_data
from .progress import Progress

if TYPE_CHECKING:
    pass

if TYPE_CHECKING:
    from collections.abc import Sequence

_KEPT = _RECENT = 7 * 86400.0  # seconds for which a job that has ended is shown by `list`, and kept by `prune`
_PATIENCE = 15.0  # seconds beyond its grace in which a job that is being stopped ends


def _ago(seconds: float, now: float) -> str:
    return show_duration(max(0.0, now - seconds))


def _seconds(flag: str, text: str | None) -> float | None:
    """A time as people write it.

    Raises:
        UserError: it is none.
    """
    try:
        return duration(text)
    except ValueError as error:
        raise UserError(f"{flag} {error}") from None


# -- list --------------------------------------------------------------------------------------------------------------


@click.command("list", params=[*where_options(), output_option()])
@click.option("-A", "--all", "every", is_flag=True, help="Also those that ended more than 7 days ago.")
@click.option("--state", multiple=True, metavar="STATE", help="Only jobs in this state; repeatable.")
@click.option("--since", metavar="2h", help="Only jobs submitted within this time.")
@click.option("--label", multiple=True, metavar="NAME=VALUE", help="Only jobs with this label; repeatable.")
def list_(every: bool, state: tuple[str, ...], since: str | None, label: tuple[str, ...], output: str) -> int:
    """List the jobs, the newest first."""
    now = time.time()
    states = {one.upper() for text in state for one in text.split(",")}
    for one in sorted(states - set(STATES)):
        raise UserError(f"--state {one}: no such state; {nearest(one, STATES)}")
    age = _seconds("--since", since)
    wanted = dict(pair.partition("=")[::2] for pair in label)
    here = backend()
    recent = not (every or states or age)
    jobs = here.describe(since=now - _RECENT if recent else None)
    shown = [
        job
        for job in jobs
        if (not states or job.state in states)
        and (age is None or job.created >= now - age)
        and wanted.items() <= job.labels.items()
    ]
    show(shown, _LIST, output, Job.to_dict)
    if recent and output in ("table", "wide") and (older := here.count() - len(jobs)) > 0:
        click.echo(f"paceline: {older} that ended long ago are not shown; see paceline list -A", err=True)
    return 0


def _duration(job: Job) -> str | None:
    seconds = job.duration(time.time())
    return None if seconds is None else show_duration(seconds)


def _text(number: int | None) -> str | None:
    return None if number is None else str(number)


_LIST: list[Column[Job]] = [
    Column("NAME", lambda job: job.name),
    Column("STATE", lambda job: job.state, colours=STATE_COLOURS),
    Column("FRAMEWORK", lambda job: job.framework),
    Column("NODES", lambda job: str(job.nodes)),
    Column("RANKS", lambda job: str(job.ranks)),
    Column("AGE", lambda job: _ago(job.created, time.time())),
    Column("DURATION", _duration),
    Column("RESTARTS", lambda job: str(job.restarts), wide=True),
    Column("EXIT", lambda job: _text(job.exit_code), wide=True),
    Column("DEVICES", lambda job: ",".join(job.devices) or None, wide=True),
    Column("LABELS", lambda job: ",".join(f"{k}={v}" for k, v in job.labels.items()) or None, wide=True),
    Column("REASON", lambda job: job.error or job.waiting, wide=True),
]


# -- get ---------------------------------------------------------------------------------------------------------------


@click.command(params=[*where_options(), output_option()])
@click.argument("name", metavar="JOB")
def get(name: str, output: str) -> int:
    """Show everything that is known of JOB."""
    (job,) = known([name])
    for why in backend().silent(name):
        _say(f"{why}; what is there is not shown")
    if output in ("json", "yaml"):
        show_data(job.to_dict(), output)
        return 0
    now = time.time()
    for key, value in _facts(job, now):
        click.echo(f"{key:<12} {printable(value)}")
    if job.instances:
        click.echo()
        show(job.instances, _INSTANCES, output, asdict)
    return 0


def _facts(job: Job, now: float) -> list[tuple[str, str]]:
    """What `get` says, line by line; what is not there is left out."""
    progress = job.progress or {}
    state = job.state if job.exit_code is None else f"{job.state} (exit code {job.exit_code})"
    facts: list[tuple[str, Any]] = [
        ("name", job.name),
        ("state", state),
        ("error", job.error),
        ("waiting", job.waiting),
        ("command", job.command),
        ("framework", job.framework),
        ("ranks", f"{job.ranks} on {job.nodes} node{'' if job.nodes == 1 else 's'}"),
        ("devices", ", ".join(job.devices)),
        ("restarts", f"{job.restarts} of {job.max_restarts}" if job.max_restarts or job.restarts else None),
        ("priority", job.priority or None),
        ("queue", job.queue),
        ("labels", ", ".join(f"{name}={value}" for name, value in job.labels.items())),
        ("created", f"{show_time(job.created)} ({_ago(job.created, now)} ago)"),
        ("started", show_time(job.started)),
        ("finished", show_time(job.finished)),
        ("duration", _duration(job)),
        ("kept for", None if job.ttl is None else f"{show_duration(job.ttl)} after its end"),
        ("progress", _progress(progress, job.is_over)),
        ("tensorboard", job.tensorboard),
        *(("data", _volume(volume)) for volume in job.data),
        ("code", _code(job.code) if job.code else None),
        ("working dir", job.working_dir),
        ("folder", job.folder),
    ]
    return [(key, str(value)) for key, value in facts if value not in (None, "")]


def _progress(progress: Any, is_over: bool) -> str:
    if not progress:
        return ""
    of = f"/{progress['epochs']}" if progress.get("epochs") else ""
    steps = f"/{progress['steps']}" if progress.get("steps") else ""
    text = f"epoch {progress['epoch'] + 1}{of}, step {progress['step']}{steps}"
    if progress.get("samples_per_second"):
        text += f", {progress['samples_per_second']:.4g} samples/s"
    if progress.get("seconds_left") is not None and not is_over:
        text += f", {show_duration(progress['seconds_left'])} left"
    return text


def _volume(volume: Any) -> str:
    where = f"{volume['volume']} at {volume['path']}"
    if volume["visible"]:
        return where
    return f"{where} (not mounted at {volume['wanted']}: the job reads {volume['variable']})"


def _code(code: Any) -> str:
    commit = f" ({code['commit'][:12]})" if code.get("commit") else ""
    return f"{code['path']}, by {code['mode']} from {code['source']}{commit}"


_INSTANCES: list[Column[Instance]] = [
    Column("INSTANCE", lambda rank: rank.name),
    Column("RANK", lambda rank: str(rank.rank)),
    Column("NODE", lambda rank: rank.node),
    Column("STATE", lambda rank: rank.state, colours=STATE_COLOURS),
    Column("PID", lambda rank: _text(rank.pid)),
    Column("EXIT", lambda rank: _text(rank.exit_code)),
]


# -- wait, stop, delete ------------------------------------------------------------------------------------------------


@click.command(params=where_options())
@click.argument("names", nargs=-1, required=True, metavar="JOB…")
@click.option("--timeout", metavar="10m", help="Give up after this time, with exit code 124.")
def wait(names: tuple[str, ...], timeout: str | None) -> int:
    """Wait until JOBs have ended; the exit code is that of the first one that failed."""
    known(names)
    seconds = _seconds("--timeout", timeout)
    if not _wait(names, seconds):
        going = [job.name for job in known(names) if not job.is_over]
        click.echo(f"paceline: {', '.join(going)} did not end within {timeout}", err=True)
        return 124
    code = 0
    for job in known(names):
        _say(outcome(job))
        code = code or _exit_code(job)
    return code


def _wait(names: Sequence[str], seconds: float | None = None) -> bool:
    """Wait for jobs to end, and show that it goes on."""
    with Progress() as progress:
        of = len(names) if len(names) > 1 else None
        return backend().wait(names, seconds, lambda ended: progress(f"waiting for {_listed(names)}", ended, of))


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])} and {len(names) - 3} more" if len(names) > 4 else ", ".join(names)


def _exit_code(job: Job) -> int:
    """The exit code of a job that is over; 1 where it died without one."""
    return (0 if job.state == "SUCCEEDED" else 1) if job.exit_code is None else job.exit_code


@click.command(params=where_options())
@click.argument("names", nargs=-1, required=True, metavar="JOB…")
@click.option("--now", is_flag=True, help="At once: nothing is saved.")
@click.option("--no-wait", is_flag=True, help="Come back before they have ended.")
def stop(names: tuple[str, ...], now: bool, no_wait: bool) -> int:
    """Stop JOBs: cleanly, so that a script that uses the library saves a checkpoint."""
    names, here = tuple(dict.fromkeys(names)), backend()
    jobs = known(names)
    untold = {job.name: here.silent(job.name) if job.state == "LOST" else [] for job in jobs}
    _refuse_lost([job for job in jobs if not untold[job.name]])
    here.stop(names, now)
    if not no_wait:
        _wait(names, _PATIENCE + (0 if now else max(job.grace for job in jobs)))
    code = 0
    for before, after in zip(jobs, known(names), strict=True):
        but = f"; not told everywhere: {', '.join(untold[before.name])}" if untold[before.name] else ""
        left = {rank.node: None for rank in after.instances if rank.state in ("STARTING", "RUNNING")}
        if before.is_over and not left:
            _say(f"job {before.name} had ended already ({before.state.lower()})")
        elif after.is_over and not left:
            _say(outcome(after) + but)
        elif no_wait:
            _say(f"job {before.name} is being stopped; its ranks have {before.grace:g} s{but}")
        else:
            where = f" on {', '.join(left)}" if left and after.nodes > 1 else ""
            at_once = f"paceline stop{here.where} --now {before.name}"
            _say(f"job {before.name} does not end{where}; end it at once with: {at_once}{but}")
            code = 1
        code = 1 if but else code
    return code


def _refuse_lost(jobs: Sequence[Job]) -> None:
    for job in jobs:
        if job.state == "LOST":
            raise UserError(
                f"job {job.name}: {job.error}; to give it up: paceline delete{backend().where} --force {job.name}"
            )


def _say(text: str) -> None:
    click.echo(f"paceline: {printable(text)}", err=True)


@click.command(params=where_options())
@click.argument("names", nargs=-1, required=True, metavar="JOB…")
@click.option("--force", is_flag=True, help="Stop those that run, at once, and forget those that are LOST.")
def delete(names: tuple[str, ...], force: bool) -> int:
    """Delete JOBs that have ended, with their logs and the checkpoints in their folders."""
    names = tuple(dict.fromkeys(names))
    here = backend()
    jobs = known(names)
    if not force:
        _refuse_lost(jobs)
    for job in jobs:
        if job.state == "LOST":
            left = here.forget(job.name)
            _say(f"job {job.name} is forgotten; what {', '.join(left)} has of it is left there")
    jobs = [job for job in jobs if job.state != "LOST"]
    names = tuple(job.name for job in jobs)
    going = [job.name for job in jobs if not job.is_over]
    if going and not force:
        raise UserError(f"job {going[0]} has not ended; stop it first with paceline stop {going[0]}, or add --force")
    if names and force:  # those that have ended too: they may live on on a host that hangs
        here.stop(names, now=True)
    if names:
        _wait(names)
    for name in names:
        here.delete([name])
        _say(f"job {name} deleted")
    return 0


@click.command(params=where_options())
@click.option(
    "-s", "--since", metavar="7d", help="Delete those that ended longer ago.  [default: 7d, or their own --ttl]"
)
@click.option("--state", multiple=True, metavar="STATE", help="Only jobs that ended so; repeatable.")
@click.option("--dry-run", is_flag=True, help="Say what would be deleted, and delete nothing.")
def prune(since: str | None, state: tuple[str, ...], dry_run: bool) -> int:
    """Delete jobs that ended long ago, and those whose time to live is over."""
    now, here = time.time(), backend()
    age = _seconds("--since", since)
    states = {one.upper() for one in state}
    old = [
        job
        for job in here.describe()
        if job.is_over
        and (not states or job.state in states)
        and (job.has_expired(now) or _ended_before(job, now, age))
    ]
    for job in old:
        ended = _ago(job.finished or job.created, now)
        click.echo(f"{job.name}  {job.state}  ended {ended} ago")
        if not dry_run:
            here.delete([job.name])
    what = "would be deleted" if dry_run else "deleted"
    click.echo(f"paceline: {len(old)} job{'' if len(old) == 1 else 's'} {what}", err=True)
    return 0


def _ended_before(job: Job, now: float, age: float | None) -> bool:
    """Whether a job ended longer ago than the user said, or than jobs are kept that do not say how long."""
    if age is None and job.ttl is not None:
        return False
    return now - (job.finished or job.created) >= (_KEPT if age is None else age)


# -- events, attach ----------------------------------------------------------------------------------------------------


@click.command(params=[*where_options(), output_option()])
@click.argument("name", metavar="JOB")
def events(name: str, output: str) -> int:
    """Show what happened to JOB, in order."""
    known([name])
    happened = backend().events(name)
    columns = [column for column in _EVENTS if column.title != "HOST" or any("host" in event for event in happened)]
    show(happened, columns, output, lambda event: {**event, "time": show_time(event["time"])})
    return 0


def _details(event: dict[str, Any]) -> str:
    left_out = ("time", "event", "host", "logs", "failure", "others", "nodes")
    parts = [f"{key}={value}" for key, value in event.items() if key not in left_out and value is not None]
    failure = event.get("failure")
    return " ".join([*parts, *([f"failure: {failure['message']}"] if failure else [])])


_EVENTS: list[Column[dict[str, Any]]] = [
    Column("TIME", lambda event: show_time(event["time"])),
    Column("HOST", lambda event: event.get("host")),  # of jobs with several
    Column("EVENT", lambda event: event["event"]),
    Column("DETAILS", _details),
]


@click.command(params=where_options(), context_settings={"ignore_unknown_options": True})
@click.argument("name", metavar="JOB")
@click.option("-i", "--instance", metavar="INSTANCE|RANK", default="0", help="Whose variables to take.  [default: 0]")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] [COMMAND]…")
def attach(name: str, instance: str, command: tuple[str, ...]) -> int:
    """Run COMMAND, or a shell, where a rank of JOB runs: in its folder, with its variables and devices."""
    (job,) = known([name])
    rank = rank_of(job, instance)
    how = backend().shell(name, rank, command)
    if not command and sys.stdin.isatty():
        click.echo(
            f"paceline: a shell beside rank {rank} of job {name}, in {job.working_dir}; leave it with exit", err=True
        )
    try:
        os.chdir(how.folder)
    except OSError as error:
        raise UserError(f"cannot go to {how.folder}: {error.strerror}; is it still there?") from None
    try:
        os.execvpe(how.command[0], how.command, how.env)
    except OSError as error:
        raise UserError(f"cannot run {how.command[0]}: {error.strerror}; check the name") from None
