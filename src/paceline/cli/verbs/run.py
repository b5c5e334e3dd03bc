"""`paceline run`: train in the foreground, here or on hosts."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

from paceline.backends.registry import HERE
from paceline.cli.flags.job import HOROVODRUN, NODES, OUTPUT, PROGRAM_ARGUMENTS, SPEC, TORCHRUN
from paceline.cli.flags.options import SectionedCommand
from paceline.cli.flags.where import job_options, options_of, place
from paceline.cli.terminal.progress import Progress
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from paceline.backends.foreground import Foreground, Shown
    from paceline.job.spec import JobSpec


def _run(**given: Any) -> int:
    """Run SCRIPT with ARGS on one or more ranks of this machine, or of hosts that ssh reaches.

    A torchrun command line works with torchrun replaced by `paceline run`; every flag may be written with - or _.
    """
    from paceline.cli.flags.spec import shown_here, shown_there, spec_of

    from .submit import detached, dry_run, ended_by_signals, refuse_script

    spec, given = spec_of(given, run)
    if given["dry_run"]:
        return dry_run(spec, place(given, spec.backend))
    if given["detach"]:
        refuse_script(given)
        return detached(spec, place(given, spec.backend))
    if spec.backend != HERE or options_of(given):
        there, shown = place(given, spec.backend), shown_there(given, spec)
        with ended_by_signals(), Progress() as progress:
            job = there.run(spec, progress, shown)
        return _follow(job, shown)

    from paceline.backends.local.foreground import LocalRun

    found: list[Shown] = []

    def split(complete: JobSpec) -> tuple[int, ...]:
        found.append(shown_here(given, int(complete.ranks)))
        return found[-1].split

    with ended_by_signals(), Progress() as progress:
        here = LocalRun(spec, progress, split)
    return _follow(here, found[-1])


def _follow(job: Foreground, shown: Shown) -> int:
    """Show a job until it ends; returns its exit code."""
    from paceline.cli.terminal.screen import Screen

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: job.interrupt(got))
    updates = job.updates()
    try:
        screen = Screen(shown, job)
        for update in updates:
            screen.show(update)
        return screen.close()
    except OSError as error:
        job.interrupt()
        for _ in updates:  # until it has ended
            pass
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):  # whoever read our output is gone, as with `| head`
            return 128 + signal.SIGPIPE
        raise UserError(f"cannot write what the ranks print: {error.strerror}; the job was stopped") from None


run = SectionedCommand(
    "run",
    callback=_run,
    help=_run.__doc__,
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
    params=[*job_options(), *SPEC, *OUTPUT, *NODES, *TORCHRUN, *HOROVODRUN, *PROGRAM_ARGUMENTS],
)
