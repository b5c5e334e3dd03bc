"""The verbs that remove jobs: they say what goes, and ask on a terminal."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from paceline.backends.base import Installs, able
from paceline.cli.flags.option import SectionedCommand, output_option
from paceline.cli.flags.selection import jobs_there, known
from paceline.cli.flags.where import OF_JOBS, backend, where_options
from paceline.cli.terminal.tables import STATE_COLOURS, Column, show, show_data, table
from paceline.cli.terminal.write import agrees, say, say_once
from paceline.job.errors import UserError
from paceline.job.quantities import show_size, show_time
from paceline.job.shown import ago
from paceline.job.text import counted

from .control import refuse_lost, wait_for
from .show import _KEPT, STATE, _seconds, _states

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backends.base import InstalledEnvironment
    from paceline.job.job import Contents, Job

_YES = click.option("-y", "--yes", is_flag=True, help="Do not ask, also on a terminal.")
_GONE = "is gone already"
_CHANGED = "has changed since it was looked at, and stays"


@dataclass(frozen=True)
class _Going:
    """A job that is to be removed, and what goes with it; None if that is not known."""

    job: Job
    contents: Contents | None


@click.command(cls=SectionedCommand, params=where_options())
@click.argument("names", nargs=-1, required=True, metavar="JOB…", **OF_JOBS)
@click.option("--force", is_flag=True, help="Stop those that run, at once, and forget those that are LOST.")
@_YES
def delete(names: tuple[str, ...], force: bool, yes: bool) -> int:
    """Delete JOBs that have ended, with their logs and the checkpoints in their folders; asks on a terminal."""
    names = tuple(dict.fromkeys(names))
    here = backend()
    here.keep_expired()
    # Newest first: a job may keep its checkpoints in the folder of an older one, which goes only after it.
    jobs = sorted(known(names), key=lambda job: job.created, reverse=True)
    if not force:
        refuse_lost(jobs)
        _refuse_running(jobs)
    going = _going(jobs)
    if (answer := _answer(going, yes)) is False:
        return 1
    why = _why_not([job for job in jobs if job.state != "LOST"], must_be_over=False) if answer else {}
    for job in jobs:
        if job.state == "LOST":
            silent = ", ".join(here.forget(job.name))
            say(f"job {job.name} is forgotten" + (f"; what {silent} has of it is left there" if silent else ""))
    there = [job.name for job in jobs if job.state != "LOST" and job.name not in why]
    if there and force:  # those that have ended too: they may live on on a host that hangs
        here.stop(there, now=True)
    if there:
        wait_for(there)
    for one in going:
        if one.job.name in there and (reason := _delete(one.job)) is not None:
            why[one.job.name] = reason
        if one.job.state != "LOST":
            say(f"job {one.job.name} {why.get(one.job.name) or f'deleted{_with([one])}'}")
    return 1 if _CHANGED in why.values() else 0


def _refuse_running(jobs: Sequence[Job]) -> None:
    """Refuse jobs that have not ended."""
    for job in jobs:
        if not job.is_over:
            end = f"paceline stop{backend().where_of(job.name)} {job.name}"
            raise UserError(f"job {job.name} has not ended; stop it first with {end}, or add --force")


@click.command(cls=SectionedCommand, params=[*where_options(), output_option()])
@click.option(
    "-s", "--since", metavar="7d", help="Delete those that ended longer ago.  [default: 7d, or their own --ttl]"
)
@STATE
@click.option(
    "--environments",
    is_flag=True,
    help="Delete environments instead that no job has used for so long; see --environment of paceline run.",
)
@click.option("--dry-run", is_flag=True, help="List what would be deleted, and delete nothing.")
@_YES
def prune(  # noqa: PLR0917 - click passes them by name
    since: str | None, state: tuple[str, ...], environments: bool, dry_run: bool, yes: bool, output: str
) -> int:
    """Delete jobs that ended long ago, and those whose time to live is over; asks on a terminal."""
    now = time.time()
    age = _seconds("--since", since, "d")
    if environments:
        if state:
            raise UserError("--state is for jobs, and --environments deletes none; leave one out")
        return _prune_environments(now - (_KEPT if age is None else age), dry_run, yes, output)
    states = _states(state)
    backend().keep_expired()
    going = _going(
        [
            job
            for job in jobs_there().jobs
            if job.is_over
            and (not states or job.state in states)
            and (job.has_expired(now) or _ended_before(job, now, age))
        ]
    )
    if dry_run:
        show(going, _COLUMNS, output, _to_dict)
        say(f"{counted(len(going), 'job')} would be deleted{_with(going)}")
        return 0
    answer = _answer(going, yes, output)
    return 1 if answer is False else _prune(going, output, is_shown=answer is True and sys.stdout.isatty())


def _ended_before(job: Job, now: float, age: float | None) -> bool:
    """Whether a job ended longer ago than the user said, or than jobs are kept that do not say how long."""
    if age is None and job.ttl is not None:
        return False
    return now - (job.finished or job.created) >= (_KEPT if age is None else age)


def _prune(going: Sequence[_Going], output: str, *, is_shown: bool) -> int:
    """Delete jobs, and print those that are gone: a table as they go, unless it is on the screen already."""
    heading, *lines = table(going, _COLUMNS, output, sys.stdout)
    is_table = output in ("table", "wide")
    gone: list[_Going] = []
    code = 0
    try:
        for one, line in zip(going, lines, strict=True):
            try:
                why = _delete(one.job)
            except UserError as error:  # one that cannot be deleted keeps no other
                say(str(error))
                code = 1
                continue
            if why is not None:
                say(f"job {one.job.name} {why}")
                continue
            if is_table and not is_shown:
                click.echo(line if gone else f"{heading}\n{line}")
            gone.append(one)
    finally:  # also after Ctrl-C
        if not is_table:
            show_data([_to_dict(one) for one in gone], output)
        say(f"{counted(len(gone), 'job')} deleted{_with(gone)}")
    return code


# -- environments ------------------------------------------------------------------------------------------------------


def _prune_environments(before: float, dry_run: bool, yes: bool, output: str) -> int:
    """Delete the environments that were not used since a time."""
    installer = able(backend(), Installs).installer()
    going = [it for it in installer.installed() if it.used < before]
    columns: list[Column[InstalledEnvironment]] = [
        Column("HOST", lambda it: it.host),
        Column("ENVIRONMENT", lambda it: it.source or "half of one"),
        Column("SIZE", lambda it: show_size(it.bytes)),
        Column("USED", lambda it: f"{ago(it.used)} ago"),
        Column("NAME", lambda it: it.name, wide=True),
    ]
    size = f", {show_size(sum(it.bytes for it in going))}" if going else ""
    if dry_run:
        show(going, columns, output, lambda it: it._asdict())
        say(f"{counted(len(going), 'environment')} would be deleted{size}")
        return 0
    if going and not yes and sys.stdin.isatty() and sys.stderr.isatty():
        click.echo("\n".join(table(going, columns, output, sys.stderr)), err=True)
        if not agrees(f"delete {counted(len(going), 'environment')}{size}?"):
            say("nothing was deleted")
            return 1
    gone = installer.remove(going)
    show(gone, columns, output, lambda it: it._asdict())
    for one in going:
        if one not in gone:
            say(f"{one.source or one.name} on {one.host} is in use, and stays")
    say(f"{counted(len(gone), 'environment')} deleted")
    return 0


# -- what goes ---------------------------------------------------------------------------------------------------------


def _going(jobs: Sequence[Job]) -> list[_Going]:
    contents = backend().contents([job.name for job in jobs]) if jobs else {}
    return [_Going(job, contents.get(job.name)) for job in jobs]


def _answer(going: Sequence[_Going], yes: bool, output: str = "table") -> bool | None:
    """Whether the user, who sees what would go, says yes; None if nobody is asked, because there is no terminal."""
    if yes or not going or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    click.echo("\n".join(table(going, _COLUMNS, output, sys.stderr)), err=True)
    if agrees(f"delete {counted(len(going), 'job')}{_with(going)}?"):
        return True
    say("nothing was deleted")
    return False


def _with(going: Sequence[_Going]) -> str:
    """The checkpoints and bytes of jobs, with a space before them; "" if that is known of none."""
    known = [one.contents for one in going if one.contents is not None]
    if not known:
        return ""
    checkpoints = counted(sum(it.checkpoints for it in known), "checkpoint")
    more = " or more" if len(known) < len(going) else ""
    return f" ({checkpoints}, {show_size(sum(it.size for it in known))}{more})"


def _to_dict(one: _Going) -> dict[str, object]:
    """The stable keys of `-o json`."""
    job = one.job
    contents = {"checkpoints": None, "size": None} if one.contents is None else asdict(one.contents)
    finished = show_time(job.finished)
    return {
        "name": job.name, "state": job.state, "backend": job.backend, "finished": finished, **contents,
        "folder": job.folder,
    }  # fmt: skip


_COLUMNS: list[Column[_Going]] = [
    Column("NAME", lambda one: one.job.name),
    Column("STATE", lambda one: one.job.state, colours=STATE_COLOURS),
    Column("ENDED", lambda one: f"{ago(one.job.finished)} ago" if one.job.finished else None),
    Column("CHECKPOINTS", lambda one: None if one.contents is None else str(one.contents.checkpoints)),
    Column("SIZE", lambda one: None if one.contents is None else show_size(one.contents.size)),
    Column("FOLDER", lambda one: one.job.folder or None, wide=True, is_text=True),
]


# -- only what was shown goes ------------------------------------------------------------------------------------------


def _delete(job: Job) -> str | None:
    """Delete a job that was looked at before; returns why it is not deleted, or None."""
    if why := _why_not([job]):
        return why[job.name]
    try:
        for line in backend().delete([job.name]):
            say_once(line)
    except UserError:
        if _CHANGED in _why_not([job]).values():
            return _CHANGED
        raise  # also where it is gone, but not all of it
    return None


def _why_not(jobs: Sequence[Job], *, must_be_over: bool = True) -> dict[str, str]:
    """Jobs that are not those any more that were looked at, or must be over and are not, by name, and why."""
    there = {job.name: job for job in backend().describe([job.name for job in jobs]).jobs}
    found = {}
    for job in jobs:
        now = there.get(job.name)
        if now is None:
            found[job.name] = _GONE
        elif not _is_same(job, now) or (must_be_over and not now.is_over):
            found[job.name] = _CHANGED
    return found


def _is_same(job: Job, now: Job) -> bool:
    """Whether it is the same job, and has not run again if it had ended."""
    has_run_again = job.is_over and (
        not now.is_over or (now.attempt, now.external_id) != (job.attempt, job.external_id)
    )
    return now.created == job.created and not has_run_again
