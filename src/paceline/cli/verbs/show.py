"""The verbs that show jobs, wait for them and end them."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from paceline.backends.base import TensorBoards
from paceline.backends.registry import HERE
from paceline.cli.flags import completion
from paceline.cli.flags.option import SectionedCommand, output_option, parse_pairs, watch_option
from paceline.cli.flags.selection import all_jobs, known, node_of
from paceline.cli.flags.where import OF_JOBS, backend, is_narrowed, where_options
from paceline.cli.terminal.live import once_or_live
from paceline.cli.terminal.tables import (
    STATE_COLOURS,
    Column,
    if_known,
    show,
    show_data,
    show_newest,
)
from paceline.cli.terminal.write import say
from paceline.job.errors import UserError, nearest
from paceline.job.job import STATES, Instance, Job
from paceline.job.quantities import duration, replicas_in_words, show_duration, show_time
from paceline.job.shown import ago, done, lasted, left, progress_of, reason
from paceline.job.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from paceline.contract.records import CodeRecord, DataRecord, TracebackRecord, Value

_KEPT = _RECENT = 7 * 86400.0  # seconds for which a job that has ended is shown by `list`, and kept by `prune`
_PATIENCE = 15.0  # seconds beyond its grace in which a job that is being stopped ends


def _seconds(flag: str, text: str | None, usual: str) -> float | None:
    """The seconds of a duration such as `2h`; `usual` is the unit that is suggested where there is none."""
    try:
        return duration(text, usual=usual)
    except ValueError as error:
        raise UserError(f"{flag} {error}") from None


def _states(given: Iterable[str]) -> set[str]:
    """The states that --state names, which may be given several times, or with commas between them."""
    states = {one.upper() for text in given for one in text.split(",")}
    for one in sorted(states - set(STATES)):
        raise UserError(f"--state {one}: no such state; {nearest(one, STATES)}")
    return states


STATE = click.option(
    "--state",
    multiple=True,
    metavar="STATE",
    shell_complete=completion.states,
    help=f"Only jobs in this state, of {', '.join(STATES)}; repeatable.",
)


# -- list --------------------------------------------------------------------------------------------------------------


@click.command("list", cls=SectionedCommand, params=[*where_options(), watch_option(), output_option()])
@click.option("-A", "--all", "every", is_flag=True, help="Also those that ended more than 7 days ago.")
@STATE
@click.option("--since", metavar="2h", help="Only jobs submitted within this time.")
@click.option(
    "--label",
    multiple=True,
    metavar="NAME=VALUE",
    shell_complete=completion.labels,
    help="Only jobs with this label; repeatable.",
)
def list_(
    every: bool, state: tuple[str, ...], since: str | None, label: tuple[str, ...], output: str, *, watch: bool
) -> int:
    """List jobs, the newest first; the newest last where a terminal is too low for all."""
    states = _states(state)
    age = _seconds("--since", since, "h")
    wanted = parse_pairs("--label", label)
    recent = not (every or states or age)

    def look() -> bool:
        now = time.time()
        found = all_jobs(now - _RECENT if recent else None, repeats=watch)
        shown = [
            job
            for job in found.jobs
            if (not states or job.state in states)
            and (age is None or job.created >= now - age)
            and wanted.items() <= job.labels.items()
        ]
        has_targets = any(job.backend != HERE for job in found.jobs) and not is_narrowed()
        columns = [column for column in _LIST if column.title != "TARGET" or has_targets]
        # A traceback is shown by `get` only.
        show_newest(shown, columns, output, lambda job: {**job.to_dict(), "traceback": None}, watch=watch)
        if recent and output in ("table", "wide") and found.hidden and not watch:
            say(f"{found.hidden} that ended long ago are not shown; see paceline list{backend().where} -A")
        elif not shown and output in ("table", "wide") and not watch:
            hint = "no jobs; start one with: paceline submit SCRIPT"
            if states or age or wanted:
                hint = "no job matches; paceline list -A shows all"
            say(hint)
        return True

    once_or_live(look, watch, "paceline list")
    return 0


_LIST: list[Column[Job]] = [
    Column("NAME", lambda job: job.name),
    Column("TARGET", lambda job: job.backend, keep=3),
    Column("STATE", lambda job: job.state, colours=STATE_COLOURS, keep=9),
    Column("DONE", done, is_optional=True, keep=7),
    Column("LEFT", left, is_optional=True, keep=6),
    Column("RANKS", lambda job: str(job.ranks), keep=4),
    Column("NODE", node_of, is_optional=True, keep=3),
    Column("FRAMEWORK", lambda job: job.framework, is_optional=True, keep=1),
    Column("KIND", lambda job: job.kind or None, is_optional=True),
    Column("AGE", lambda job: ago(job.created), keep=5),
    Column("DURATION", lasted, is_optional=True, keep=2),
    Column("NODES", lambda job: str(job.nodes), wide=True),
    Column("RESTARTS", lambda job: str(job.restarts), wide=True),
    Column("EXIT", lambda job: if_known(str, job.exit_code), is_optional=True, wide=True),
    Column("DEVICES", lambda job: ",".join(job.devices) or None, is_optional=True, wide=True),
    Column("LABELS", lambda job: _pairs(job.labels, ","), is_optional=True, wide=True, is_text=True),
    Column("ID", lambda job: job.external_id or None, is_optional=True, wide=True),
    Column("URL", lambda job: job.url or None, is_optional=True, wide=True, is_text=True),
    Column("REASON", reason, is_optional=True, wraps=True, least=40, keep=-1),
]


# -- get ---------------------------------------------------------------------------------------------------------------


@click.command(cls=SectionedCommand, params=[*where_options(), watch_option(), output_option()])
@click.argument("name", metavar="JOB", **OF_JOBS)
def get(name: str, output: str, *, watch: bool) -> int:
    """Show all details of JOB; with -w until it has ended."""
    if watch:
        backend().look_repeatedly()

    def look() -> bool:
        (job,) = known([name], warns=True)
        if output in ("json", "yaml"):
            from paceline.backends.facts import facts  # people get them as lines

            there = backend()
            known_of = facts(job, lambda: there.events(name), there.where_of(name))
            show_data({**job.to_dict(), "facts": known_of}, output)
            return not job.is_over
        for key, value in _facts(job):
            click.echo(f"{key:<12} {printable(value)}")
        if job.instances:
            click.echo()
            show(job.instances, _INSTANCES, output, asdict)
        if job.traceback:
            click.echo("\n" + "\n".join(_traceback(job.name, job.traceback)))
        return not job.is_over

    once_or_live(look, watch, f"paceline get {name}")
    return 0


def _traceback(name: str, traceback: TracebackRecord) -> Iterator[str]:
    """The lines of `get` about a traceback: where all of it is, and its last lines."""
    rank = traceback["rank"]
    where = backend().where_of(name)
    yield f"the traceback of rank {rank} ends so; see all of it with: paceline logs{where} -i {rank} {name}"
    yield from map(printable, traceback["text"].split("\n"))


def _last_restart(job: Job) -> str | None:
    """The time and cause of a job's last restart; None if no rank failed, or nothing is known."""
    from paceline.backends.story import failed  # jobs that never failed do not need it

    for event in reversed(backend().events(job.name)) if job.restarts else ():
        if event["event"] == "restarting":
            failure = event.get("failure")
            why = failed(failure) if failure else event.get("why")
            return f"{show_time(event['time'])}: {why}" if why else None
    return None


def _facts(job: Job) -> list[tuple[str, str]]:
    """The lines of `get`, without those that do not apply."""
    state = job.state if job.exit_code is None else f"{job.state} (exit code {job.exit_code})"
    facts: list[tuple[str, Any]] = [
        ("name", job.name),
        ("external id", job.external_id),
        ("url", job.url),
        ("state", state),
        ("error", job.error),
        ("advice", job.advice),
        ("waiting", job.waiting),
        *(("slow", line) for line in job.slow),
        ("command", job.command),
        ("framework", job.framework),
        ("environment", job.environment),
        ("kind", job.kind),
        ("image", job.image),
        ("ranks", f"{job.ranks} on {counted(job.nodes, 'node')}"),
        ("device" if len(job.devices) == 1 else "devices", ", ".join(job.devices) or _count_of_devices(job)),
        ("restarts", f"{job.restarts} of {job.max_restarts}" if job.max_restarts or job.restarts else None),
        ("last restart", _last_restart(job)),
        ("resumes", job.resume_from),
        ("priority", job.priority or None),
        ("queue", job.queue),
        ("labels", _pairs(job.labels, ", ")),
        ("options", ", ".join(_options(job.options))),
        ("created", f"{show_time(job.created)} ({ago(job.created)} ago)"),
        ("started", show_time(job.started)),
        ("finished", show_time(job.finished)),
        ("duration", lasted(job)),
        ("kept for", None if job.ttl is None else f"{show_duration(job.ttl)} after its end"),
        ("progress", progress_of(job)),
        *(("replicas", line.removeprefix("replicas were ")) for line in replicas_in_words(job.progress)),
        ("checkpoint", f"step {job.checkpoint['step']}, in {job.checkpoint['folder']}" if job.checkpoint else None),
        ("tensorboard", _tensorboard(job)),
        *(("data", _volume(volume)) for volume in job.data),
        ("code", _code(job.code) if job.code else None),
        ("working dir", job.working_dir),
        ("folder", job.folder),
        ("logs", job.logs),
    ]
    return [(key, str(value)) for key, value in facts if value not in (None, "")]


def _count_of_devices(job: Job) -> str | None:
    """How many devices a job has whose names are not known; that it needs none."""
    if job.allocated is not None:
        return f"{job.allocated} allocated" if job.allocated else None
    asked = job.devices_asked
    if asked and not job.is_over:
        return f"{asked if isinstance(asked, int) else ', '.join(asked)} requested"
    return "none" if asked == 0 else None


def _pairs(labels: Mapping[str, str], between: str) -> str | None:
    return between.join(f"{name}={value}" for name, value in labels.items()) or None


def _options(options: Mapping[str, Value], within: str = "") -> Iterator[str]:
    """The options of a job, as NAME=VALUE; those of tables as TABLE.NAME=VALUE."""
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _options(value, f"{within}{name}.")
        else:
            yield f"{within}{name}={value if isinstance(value, str) else json.dumps(value)}"


def _tensorboard(job: Job) -> str | None:
    """The address of the job's TensorBoard, and how to reach it from here; or why there is none."""
    here, url = backend(), job.tensorboard
    if url is None or "://" not in url or not isinstance(here, TensorBoards):
        return url
    how = here.reach_tensorboard(job.name, url)
    return f"{url} ({how})" if how else url


def _volume(volume: DataRecord) -> str:
    where = f"{volume['volume']} at {volume['path']}"
    if volume["visible"]:
        return where if volume["wanted"] == volume["path"] else f"{where}, which the job sees at {volume['wanted']}"
    why = f": {volume['problem']}" if volume["problem"] else ""
    return f"{where} (not mounted at {volume['wanted']}{why}; the job reads {volume['variable']})"


def _code(code: CodeRecord) -> str:
    commit = code.get("commit")
    return f"{code['path']}, by {code['mode']} from {code['source']}{f' ({commit[:12]})' if commit else ''}"


_INSTANCES: list[Column[Instance]] = [
    Column("INSTANCE", lambda rank: rank.name),
    Column("RANK", lambda rank: str(rank.rank)),
    Column("NODE", lambda rank: rank.node),
    Column("STATE", lambda rank: rank.state, colours=STATE_COLOURS),
    Column("PID", lambda rank: if_known(str, rank.pid)),
    Column("EXIT", lambda rank: if_known(str, rank.exit_code)),
]
