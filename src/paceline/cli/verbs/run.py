"""`paceline run`: train in the foreground, here or on hosts."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

from paceline.backends import registry
from paceline.cli.flags.allocation import in_allocation
from paceline.cli.flags.job import HOROVODRUN, NODES, OUTPUT, PROGRAM_ARGUMENTS, SPEC, TENSORFLOW, TORCHRUN, USUAL
from paceline.cli.flags.options import UNDERSCORES, SectionedCommand
from paceline.cli.flags.where import backend_for, job_options, target_of
from paceline.cli.terminal.progress_bar import ProgressLine
from paceline.cli.terminal.write import say
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from paceline.backends.base import Backend
    from paceline.backends.foreground import Foreground, RankStreams


def _run(**given: Any) -> int:
    """Run SCRIPT with ARGS on one or more ranks of this machine, of hosts that ssh reaches, or of an allocation.

    A torchrun command line works with torchrun replaced by `paceline run`; every flag may be written with - or _.
    """
    from paceline.cli.flags.spec import (
        rank_streams,
        say_what_idles,
        say_what_is_exposed,
        say_what_means_nothing,
        spec_of,
    )
    from paceline.cli.terminal.ending import ended_by_signals

    from .submit import detached, dry_run, refuse_script

    typed = given
    spec, given = spec_of(given, run)
    say_what_means_nothing(given)
    say_what_is_exposed(spec)
    there = backend_for(given, target_of(spec))
    if not given["detach"] and (found := in_allocation(given, spec, there)) is not None:
        there, follows = found
        spec, given = spec_of({**typed, **follows}, run)
    if given["stdin"] is not None and (given["detach"] or there.name != registry.HERE):
        raise UserError("--stdin: only ranks on this machine, in the foreground, can read it; leave the flag out")
    if given["detach"]:
        refuse_script(given)
    if given["dry_run"]:
        return dry_run(spec, there, detached=given["detach"])
    if given["detach"]:
        return detached(spec, there, verbose=given["verbose"])
    from paceline.backends.foreground import obey_signals

    early: list[int] = []
    with ended_by_signals(early), ProgressLine() as progress:
        prepared = there.prepare(spec, detached=False)
        say_what_idles(spec)
        watched = rank_streams(given, prepared)
        job = there.run(prepared, progress, watched)
        obey_signals(job, early)
    code = _follow(job, watched, verbose=given["verbose"])
    if code:
        _say_how_to_resume(job.name, there)
    return code


def _say_how_to_resume(name: str, there: Backend) -> None:
    """Say what is saved of a job that ended before its training did, and how it goes on."""
    from paceline.cli.flags.selection import how_to_resume

    with contextlib.suppress(UserError, OSError):  # its host does not answer, or nobody reads
        for job in there.describe([name]).jobs:
            if (how := how_to_resume(job, there.where)) is not None:
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


run = SectionedCommand(
    "run",
    callback=_run,
    usual=USUAL,
    context_settings={"allow_interspersed_args": False, **UNDERSCORES},
    params=[*job_options(), *SPEC, *OUTPUT, *NODES, *TORCHRUN, *HOROVODRUN, *TENSORFLOW, *PROGRAM_ARGUMENTS],
)
