"""`paceline run`: train in the foreground, here or on hosts."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
from typing import TYPE_CHECKING, Any

from paceline.backends import registry
from paceline.cli.flags.job import OUTPUT, REHEARSAL, REST, SPEC, USUAL, Given
from paceline.cli.flags.option import BOTH, ERR, OUT, UNDERSCORES, SectionedCommand, parse_numbers, parse_streams
from paceline.cli.flags.selection import how_to_resume
from paceline.cli.flags.where import backend_for, backend_of_job, is_elsewhere, job_options
from paceline.cli.terminal.progress_bar import ProgressLine
from paceline.cli.terminal.write import say, say_once
from paceline.job.errors import UserError

from . import rehearse

if TYPE_CHECKING:
    from paceline.backends.base import Backend, Prepared
    from paceline.backends.foreground import Foreground, RankStreams
    from paceline.job.spec import JobSpec


def _run(**params: Any) -> int:
    """Run SCRIPT with ARGS on one or more ranks of this machine, of hosts that ssh reaches, or of an allocation.

    A torchrun command line works with torchrun replaced by `paceline run`; every flag may be written with - or _.
    """
    from paceline.cli.flags.spec import say_what_idles, say_what_is_exposed, say_what_means_nothing, spec_of
    from paceline.cli.terminal.write import ended_by_signals

    from .submit import detached, dry_run, refuse_script

    typed = Given(params)
    rehearsed = rehearse.ranks_of(typed)
    spec, given = spec_of(typed, run)
    say_what_means_nothing(given)
    say_what_is_exposed(spec)
    there = backend_of_job(given, spec)
    if rehearsed is not None:
        return rehearse.rehearse(rehearsed, spec, given, there)
    if not given.detach and (found := _in_allocation(given, spec, there)) is not None:
        there, nnodes, ranks = found
        given.nnodes, given.ranks = nnodes or given.nnodes, ranks or given.ranks
        spec, given = spec_of(given, run)
    if given.stdin is not None and (given.detach or there.name != registry.HERE):
        raise UserError("--stdin: only ranks on this machine, in the foreground, can read it; leave the flag out")
    if given.detach:
        refuse_script(given)
    if given.dry_run:
        return dry_run(spec, there, detached=given.detach)
    if given.detach:
        return detached(spec, there, verbose=given.verbose)
    from paceline.backends.foreground import obey_signals

    early: list[int] = []
    with ended_by_signals(early), ProgressLine() as progress:
        prepared = there.prepare(spec, detached=False)
        say_what_idles(spec)
        watched = _streams_of(given, prepared)
        job = there.run(prepared, progress, watched)
        obey_signals(job, early)
    code = _follow(job, watched, verbose=given.verbose)
    if code:
        _say_how_to_resume(job.name, there)
    return code


def _in_allocation(given: Given, spec: JobSpec, there: Backend) -> tuple[Backend, str | None, str | None] | None:
    """The backend that uses the allocation of this process, and the --nnodes and -n that follow from it.

    None if there is no allocation, or the job is not for it: its flags name other places, or say that it is started on
    each node by hand, or on this machine alone. Warns if it was started several times, each for itself.
    """
    is_named = given.on is not None
    by_hand = (given.standalone, given.node_rank, given.master_addr, given.rdzv_endpoint)  # given on each node
    if not is_named and (
        is_elsewhere(given) or any(it not in (None, False) for it in by_hand)
        or (spec.node_range == (1, 1) and "nodes" in spec.given)
    ):  # fmt: skip
        return None
    if is_named and there.name == registry.HERE:
        return None
    found = registry.allocation()
    if found is None:
        if there.name == registry.HERE and spec.node_range == (1, 1) and (line := registry.started_alone()) is not None:
            say_once(line)
        return None
    kind, allocation = found
    inside: Backend | None = there
    if there.name != registry.HERE or not allocation.is_here:
        flags = copy.copy(given)
        flags.on = kind
        place = backend_for(flags) if there.name == registry.HERE else there
        inside = place.within(allocation)
    if inside is None:
        return None
    nnodes = None if "nodes" in spec.given else str(len(allocation.hosts))
    ranks = None
    if "ranks" not in spec.given and allocation.ranks is not None:
        if not allocation.ranks:
            raise UserError(
                f"the tasks of allocation {allocation.id} are not the same number on each node; say how many ranks each"
                " node is to have with -n"
            )
        ranks = str(allocation.ranks)
    return inside, nnodes, ranks


def _say_how_to_resume(name: str, there: Backend) -> None:
    """Say what is saved of a job that ended before its training did, and how it goes on."""
    with contextlib.suppress(UserError, OSError):  # its host does not answer, or nobody reads
        for job in there.describe([name]).jobs:
            if (how := how_to_resume(job, there.where_of(job.name))) is not None:
                say(how)


def _follow(job: Foreground, streams: RankStreams, *, verbose: bool) -> int:
    """Show a job until it ends; returns its exit code."""
    from paceline.cli.terminal.screen import Screen

    updates = job.updates()
    try:
        screen = Screen(streams, job, verbose=verbose)
        for update in updates:
            screen.show(update)
        return screen.close()
    except OSError as error:
        job.interrupt()
        for _ in updates:  # until it has ended
            pass
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):  # the reader of our output has ended, as with `| head`
            return 128 + signal.SIGPIPE
        raise UserError(f"cannot write what the ranks print: {error.strerror}; the job was stopped") from None


# -- what is shown -----------------------------------------------------------------------------------------------------


def _streams_of(given: Given, prepared: Prepared) -> RankStreams:
    """What of a job's output goes to the screen: the first rank of what is started here, and those that --tee names."""
    from paceline.backends.foreground import RankStreams

    first, others = (
        {rank: streams for rank, streams in _shown_streams(given, prepared.node_ranks, is_first).items() if streams}
        for is_first in (True, prepared.is_part)
    )
    split = tuple(sorted({*_split_streams(first), *_split_streams(others)}))
    several = len(first) + (len(others) if prepared.spec.nodes != 1 and not prepared.is_part else 0) > 1
    return RankStreams(first, others, split, several, _stdin(given, prepared.node_ranks))


def _stdin(given: Given, ranks: int) -> int | None:
    """The local rank that reads this process's standard input."""
    rank = given.stdin
    if rank is None:
        return None
    if rank >= ranks:
        raise UserError(f"--stdin {rank}: there {'are' if ranks > 1 else 'is'} {ranks} here, numbered from 0")
    try:
        os.close(os.open("/proc/self/fd/0", os.O_RDONLY | os.O_NOCTTY))
    except OSError as error:
        raise UserError(
            f"--stdin {rank}: standard input cannot be passed on ({error.strerror}); use a file, a pipe or a terminal"
        ) from None
    return rank


def _shown_streams(given: Given, ranks: int, is_first: bool = True) -> dict[int, int]:
    """Which streams of which local ranks are shown: the first one's, and those that --tee names."""
    streams = {rank: BOTH if rank == 0 and is_first else 0 for rank in range(ranks)}
    if given.local_ranks_filter:
        chosen = parse_numbers("--local-ranks-filter", given.local_ranks_filter)
        if max(chosen) >= ranks:
            raise UserError(f"--local-ranks-filter names {max(chosen)}, but there are {ranks} ranks, numbered from 0")
        streams = {rank: BOTH if rank in chosen else 0 for rank in range(ranks)}
    if given.redirects:
        hidden = parse_streams("--redirects", given.redirects, ranks)
        streams = {rank: streams[rank] & ~hidden[rank] for rank in range(ranks)}
    if given.tee:
        added = parse_streams("--tee", given.tee, ranks)
        allowed = {r: BOTH for r in range(ranks)}
        if given.local_ranks_filter:
            allowed = {rank: BOTH if rank in chosen else 0 for rank in range(ranks)}
        streams = {rank: streams[rank] | (added[rank] & allowed[rank]) for rank in range(ranks)}
    return streams


def _split_streams(streams_of_ranks: dict[int, int]) -> tuple[int, ...]:
    """The local ranks whose stdout and stderr must be kept apart: one is hidden, or they go to different places."""
    out, err = os.fstat(1), os.fstat(2)
    apart = (out.st_dev, out.st_ino) != (err.st_dev, err.st_ino)
    return tuple(rank for rank, streams in streams_of_ranks.items() if streams in (OUT, ERR) or (streams and apart))


run = SectionedCommand(
    "run",
    callback=_run,
    usual=USUAL,
    context_settings={"allow_interspersed_args": False, **UNDERSCORES},
    params=[*job_options(), *SPEC, *OUTPUT, *REHEARSAL, *REST],
)
