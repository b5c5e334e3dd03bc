"""`paceline run`: train here, in the foreground."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

import click

from paceline.job.errors import UserError

from .options import Option, SectionedCommand

if TYPE_CHECKING:
    from paceline.backends.local import LocalRun


def _run(**given: Any) -> int:
    """Run SCRIPT with ARGS on one or more ranks of this machine.

    A torchrun command line works with torchrun replaced by `paceline run`; every flag may be written with - or _.
    """
    from paceline.backends import local

    from .flags import job_spec, shown_streams, split_streams

    spec = local.complete(job_spec(given))
    shown = shown_streams(given, int(spec.ranks))
    if given["dry_run"]:
        ranks = local.describe_ranks(local.place(spec))
        click.echo(json.dumps({"job": spec.model_dump(), "ranks": ranks}, indent=2))
        return 0
    job = local.LocalRun(local.place(spec, split_streams(shown)), spec.log_dir)
    if spec.detached:
        click.echo(f"paceline: job {spec.name} goes on without this terminal; logs in {job.directory.path}", err=True)
        click.echo(f"paceline: stop it with: kill {job.process.pid}", err=True)
        return 0
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
    params=[
        Option(
            ["-n", "--nproc-per-node", "ranks"],
            section="Ranks",
            envvar="PET_NPROC_PER_NODE",
            metavar="N|auto|gpu|cpu",
            help="Ranks on this machine. auto: one a GPU, else one a core.  [default: 1]",
        ),
        Option(
            ["-np", "total"],
            section="Ranks",
            type=int,
            metavar="N",
            help="Ranks on all machines together, as horovodrun counts.",
        ),
        Option(["--devices"], section="Ranks", metavar="0,1", help="GPUs that the job may use."),
        Option(
            ["--framework"],
            section="Ranks",
            metavar="NAME",
            help="Whose variables the ranks get.  [default: what the script imports]",
        ),
        Option(
            ["--env"],
            section="Ranks",
            multiple=True,
            metavar="NAME=VALUE",
            help="Set a variable for the ranks; repeatable.",
        ),
        Option(
            ["--pass-index"],
            section="Ranks",
            is_flag=True,
            help="Append --process_index I --process_num N (with --framework indexed).",
        ),
        Option(
            ["-m", "--module"],
            section="Program",
            is_flag=True,
            envvar="PET_MODULE",
            help="SCRIPT is a module, as in python -m.",
        ),
        Option(
            ["--no-python"],
            section="Program",
            is_flag=True,
            envvar="PET_NO_PYTHON",
            help="SCRIPT is any program on PATH.",
        ),
        Option(
            ["--run-path"],
            section="Program",
            is_flag=True,
            envvar="PET_RUN_PATH",
            help="As in torchrun; every script runs inside its rank anyway.",
        ),
        Option(
            ["--start-method"],
            section="Program",
            type=click.Choice(["fork", "exec", "spawn", "forkserver"]),
            default="fork",
            envvar="PET_START_METHOD",
            help="fork: from a process that has imported the framework; exec: each on its own.  [default: fork]",
        ),
        Option(
            ["--preload"], section="Program", metavar="MODULE,…", help="More modules to import once, before the fork."
        ),
        Option(
            ["--name"],
            section="Job",
            metavar="NAME",
            help="The job's name.  [default: the script's and five random characters]",
        ),
        Option(
            ["--max-restarts"],
            section="Job",
            type=click.IntRange(0),
            default=0,
            envvar="PET_MAX_RESTARTS",
            metavar="N",
            help="How often all ranks start again after a failure.  [default: 0]",
        ),
        Option(
            ["--grace"],
            section="Job",
            type=click.FloatRange(0),
            default=30.0,
            metavar="SECONDS",
            help="Between SIGTERM and SIGKILL when the job is stopped.  [default: 30]",
        ),
        Option(["--detach"], section="Job", is_flag=True, help="Come back at once; the job outlives this terminal."),
        Option(
            ["--dry-run"], section="Job", is_flag=True, help="Print the job and the ranks' variables; start nothing."
        ),
        Option(
            ["--log-dir"],
            section="Output",
            envvar="PET_LOG_DIR",
            metavar="DIR",
            help="Where the job's folder with its logs goes.  [default: ~/.local/state/paceline/jobs]",
        ),
        Option(
            ["-t", "--tee"],
            section="Output",
            envvar="PET_TEE",
            metavar="all|0:3,1:2",
            help="Ranks to show besides local rank 0 (1 stdout, 2 stderr, 3 both), their lines behind [rank N].",
        ),
        Option(
            ["-r", "--redirects"],
            section="Output",
            envvar="PET_REDIRECTS",
            metavar="3|0:1,…",
            help="Streams to keep off the screen.",
        ),
        Option(
            ["--local-ranks-filter"],
            section="Output",
            envvar="PET_LOCAL_RANKS_FILTER",
            metavar="0,1",
            help="Show these local ranks and no others.",
        ),
        Option(
            ["--nnodes"],
            section="Several machines, by hand",
            envvar="PET_NNODES",
            default="1",
            metavar="N",
            help="How many machines take part; start this command on each.  [default: 1]",
        ),
        Option(
            ["--node-rank"],
            section="Several machines, by hand",
            type=click.IntRange(0),
            envvar="PET_NODE_RANK",
            metavar="I",
            help="This machine's number, 0 at the main address.  [default: as they come]",
        ),
        Option(
            ["--master-addr"],
            section="Several machines, by hand",
            envvar="PET_MASTER_ADDR",
            metavar="HOST",
            help="Address of node 0.",
        ),
        Option(
            ["--master-port"],
            section="Several machines, by hand",
            type=click.IntRange(1, 65535),
            envvar="PET_MASTER_PORT",
            metavar="PORT",
            help="Where the machines meet; on one machine, MASTER_PORT.  [default: 29500; a free one]",
        ),
        Option(
            ["--local-addr"],
            section="Several machines, by hand",
            envvar="PET_LOCAL_ADDR",
            metavar="HOST",
            help="Name of this machine among the others.  [default: found out]",
        ),
        Option(
            ["--rdzv-endpoint"],
            section="Several machines, by hand",
            envvar="PET_RDZV_ENDPOINT",
            metavar="HOST[:PORT]",
            help="The same as --master-addr and --master-port.",
        ),
        Option(
            ["--rdzv-id"],
            section="Several machines, by hand",
            envvar="PET_RDZV_ID",
            metavar="ID",
            help="What the machines of one job have in common.  [default: none]",
        ),
        Option(
            ["--rdzv-backend"],
            section="Several machines, by hand",
            envvar="PET_RDZV_BACKEND",
            metavar="c10d|static",
            help="Either means paceline's own coordinator.",
        ),
        Option(
            ["--rdzv-conf"],
            section="Several machines, by hand",
            envvar="PET_RDZV_CONF",
            metavar="K=V,…",
            help="join_timeout=SECONDS: how long to wait for the others.  [default: 600]",
        ),
        Option(
            ["--standalone"],
            section="Several machines, by hand",
            is_flag=True,
            envvar="PET_STANDALONE",
            help="One machine; the default.",
        ),
        Option(
            ["--role"],
            section="torchrun",
            envvar="PET_ROLE",
            default="default",
            metavar="NAME",
            help="ROLE_NAME of the ranks.",
        ),
        Option(
            ["--monitor-interval"],
            section="torchrun",
            type=float,
            envvar="PET_MONITOR_INTERVAL",
            metavar="SECONDS",
            help="Accepted; paceline waits for events.",
        ),
        click.Argument(["script"]),
        click.Argument(["args"], nargs=-1, type=click.UNPROCESSED),
    ],
)
