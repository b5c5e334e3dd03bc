"""`paceline tensorboard`: the address of a job's TensorBoard."""

from __future__ import annotations

import click

from paceline.backends.base import TensorBoards, able
from paceline.cli.flags.names import known, warn
from paceline.cli.flags.options import Option, SectionedCommand
from paceline.cli.flags.where import backend, remember_jobs, where_options


def _tensorboard(job: str, logdir: str | None, stop: bool) -> None:
    """Print the address of JOB's TensorBoard.

    One is started if there is none, also for a job that has ended; it runs until --stop, or until the job is deleted.
    """
    from paceline.job.errors import UserError

    if stop and logdir is not None:
        raise UserError("--stop and --logdir contradict each other; give one of them")
    known([job])
    here = able(backend(), TensorBoards)
    if not stop:
        click.echo(here.open_tensorboard(job, logdir, warn))
    elif here.close_tensorboard(job):
        click.echo(f"the TensorBoard of {job} has ended")
    else:
        click.echo(f"{job} has no TensorBoard")


tensorboard = SectionedCommand(
    "tensorboard",
    callback=_tensorboard,
    help=_tensorboard.__doc__,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    params=[
        click.Argument(["job"], callback=remember_jobs),
        *where_options(),
        Option(["--logdir"], metavar="DIR", help="What it shows.  [default: what the job said, or its folder]"),
        Option(["--stop"], is_flag=True, help="End it."),
    ],
)
