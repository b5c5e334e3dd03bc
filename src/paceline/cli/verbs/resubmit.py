"""`paceline resubmit`: a job again, from the checkpoints that it has left."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

import click

from paceline.backends.again import changed, kept_there, next_name, refuse_nodes_here, refuse_running
from paceline.backends.base import Moves, able
from paceline.cli.flags.job import FILES, JOB, NODES, RANKS, USUAL, Given
from paceline.cli.flags.option import UNDERSCORES, Option, SectionedCommand
from paceline.cli.flags.selection import known
from paceline.cli.flags.spec import fields, say_what_is_exposed
from paceline.cli.flags.where import (
    OF_JOBS,
    backend,
    backend_before,
    backend_for,
    given_where,
    own_options,
    taking_part,
    where_options,
)
from paceline.cli.terminal.write import say

from .submit import detached, dry_run, started

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.backends.base import Backend
    from paceline.job.job import Job

# What belongs to the code and the folders of the job, which stay.
_KEPT = {"working_dir", "sync_mode", "sync_source", "log_dir"}


def _changeable() -> list[Option]:
    """The flags of `submit` that may change a job. The environment sets none of them, because the job has values."""
    nnodes = [option for option in NODES if option.name == "nnodes"]
    options = []
    for option in (*RANKS, *nnodes, *JOB, *FILES):
        if option.name not in _KEPT:
            changed = copy.copy(option)
            changed.envvar = None
            changed.help = re.sub(r"\s*\[default: .*\]$", "", option.help or "")
            options.append(changed)
    return [*options, *own_options()]


def _resubmit(job: str, args: tuple[str, ...], fresh: bool, **params: Any) -> int:
    """Run JOB again; it goes on from its newest checkpoint.

    Flags change what the job was submitted with, such as -n, --nnodes, --gpus, --env or --time-limit. ARGS replace all
    arguments of the script. The code and the folders stay as they were. With --on or -H, the job moves to other
    machines than it ran on: its code and its newest checkpoint are copied there.
    """
    there, given = backend(), Given(params)
    here = backend_before(job, there) or there
    (old,) = known([job], there=here)
    refuse_running(old, here)
    changes: dict[str, object] = {"fresh": fresh, "resume_from": job, **({"args": args} if args else {})}
    if here is not there:
        return _moved(old, here, there, given, changes)
    before = here.spec(job)
    given.nnodes = given.nnodes or str(before.nodes)
    changes.update(_changes(given))
    spec = changed(here.replaced(before, changes), {"name": next_name(old, before), **changes})
    say_what_is_exposed(spec)
    return dry_run(spec, here) if given.dry_run else detached(spec, here)


def _moved(old: Job, here: Backend, there: Backend, given: Given, changes: dict[str, object]) -> int:
    """Run a job again on another target than it ran on."""
    source, destination = able(here, Moves), able(there, Moves)
    export = source.export(old.name, fresh=bool(changes["fresh"]))
    before = here.spec(old.name)
    where = given_where()
    names_hosts = where.on is None
    given.nnodes = given.nnodes or (None if names_hosts else str(before.nodes))
    kept = kept_there(before, here, there, say)
    if names_hosts:  # as with submit, the hosts say how many nodes and ranks there are, unless other flags do
        given.of_backends = where.of_backends
        there = backend_for(given, hosts=taking_part(given))
        destination = able(there, Moves)
    changes.update(_changes(given))
    spec = changed(kept, {"name": next_name(old, before), **changes})
    say_what_is_exposed(spec)
    refuse_nodes_here(spec, there)
    prepared = destination.prepare_moved(spec, export)
    if given.dry_run:
        click.echo(prepared.text())
        return 0
    return started(prepared, there)


def _changes(given: Given) -> dict[str, object]:
    """The fields of a job that the flags set."""
    found = fields(given)
    found.pop("backend", None)
    return found


def _parameters() -> Iterable[click.Parameter]:
    yield from where_options()
    yield from _changeable()
    yield Option(
        ["--fresh"], section="Job", is_flag=True, help="Begin anew: with none of the checkpoints that JOB has left."
    )
    yield click.Argument(["job"], **OF_JOBS)
    yield click.Argument(["args"], nargs=-1, type=click.UNPROCESSED, metavar="[--] [ARGS]…")


resubmit = SectionedCommand(
    "resubmit",
    callback=_resubmit,
    usual=("--fresh", *USUAL),
    context_settings=UNDERSCORES,
    params=list(_parameters()),
)
