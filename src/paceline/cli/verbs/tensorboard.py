"""`paceline tensorboard`: the address of a job's TensorBoard."""

from __future__ import annotations

import contextlib
import sys

import click

from paceline.backends.base import Forwards, TensorBoards, able
from paceline.cli.flags.option import Option, SectionedCommand, Whole
from paceline.cli.flags.selection import known
from paceline.cli.flags.where import OF_JOBS, backend, where_options
from paceline.cli.terminal.write import ended_by_signals, say_once


def _tensorboard(job: str, logdir: str | None, port: int | None, stop: bool) -> None:
    """Print the address of JOB's TensorBoard; on Kubernetes it leads there until Ctrl-C.

    One is started if there is none, also for a job that has ended; it runs until --stop, or until the job is deleted.
    """
    from paceline.job.errors import UserError

    if stop and logdir is not None:
        raise UserError("--stop and --logdir contradict each other; give one of them")
    known([job])
    here = able(backend(), TensorBoards)
    if port is not None and not isinstance(here, Forwards):
        raise UserError("--port: here a TensorBoard takes a free port, and its address is printed; leave it out")
    if not stop:
        with ended_by_signals():
            url = here.open_tensorboard(job, logdir, say_once)
            if isinstance(here, Forwards):
                _forward(here, job, url, port)
            else:
                click.echo(url)
    elif here.close_tensorboard(job):
        click.echo(f"the TensorBoard of {job} has ended")
    else:
        click.echo(f"{job} has no TensorBoard")


def _forward(here: Forwards, job: str, url: str, port: int | None) -> None:
    """Lead a port of this machine there, until Ctrl-C."""
    with here.forward_tensorboard(job, url, say_once, port=port) as forward:
        click.echo(forward.url)
        sys.stdout.flush()
        say_once("open this address in a browser; Ctrl-C ends the connection")
        with contextlib.suppress(KeyboardInterrupt):
            forward.serve()


tensorboard = SectionedCommand(
    "tensorboard",
    callback=_tensorboard,
    params=[
        click.Argument(["job"], **OF_JOBS),
        *where_options(),
        Option(["--logdir"], metavar="DIR", help="Folder that it shows.  [default: what the job said, or its own]"),
        Option(
            ["--port"],
            type=Whole(1, 65535),
            metavar="PORT",
            help="Port of this machine, on Kubernetes.  [default: TensorBoard's, or a free one]",
        ),
        Option(["--stop"], is_flag=True, help="End the TensorBoard."),
    ],
)
