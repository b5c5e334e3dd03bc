"""`paceline run`: train here, in the foreground."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

from paceline.job.errors import UserError

from .job_options import NODES, OUTPUT, PROGRAM_ARGUMENTS, SPEC, TORCHRUN
from .options import SectionedCommand
from .progress import Progress

if TYPE_CHECKING:
    from paceline.backends.foreground import LocalRun
    from paceline.job.spec import JobSpec


def _run(**given: Any) -> int:
    """Run SCRIPT with ARGS on one or more ranks of this machine.

    A torchrun command line works with torchrun replaced by `paceline run`; every flag may be written with - or _.
    """
    from .flags import shown_streams, spec_of, split_streams
    from .submit import detached, dry_run, ended_by_signals

    spec = spec_of(given, run)
    if given["dry_run"]:
        return dry_run(spec)
    if given["detach"]:
        return detached(spec)

    from paceline.backends.foreground import LocalRun

    shown: dict[int, int] = {}

    def split(complete: JobSpec) -> tuple[int, ...]:
        shown.update(shown_streams(given, int(complete.ranks)))
        return split_streams(shown)

    with ended_by_signals(), Progress() as progress:
        job = LocalRun(spec, progress, split)
    return _follow(job, shown)


def _follow(job: LocalRun, shown: dict[int, int]) -> int:
    """Show a job until it ends; returns its exit code."""
    from .screen import Screen

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: job.interrupt(got))
    try:
        screen = Screen(shown, job)
        for update in job.updates():
            screen.show(update)
        return screen.close()
    except OSError as error:
        job.interrupt()
        job.process.wait()
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
    params=[*SPEC, *OUTPUT, *NODES, *TORCHRUN, *PROGRAM_ARGUMENTS],
)
