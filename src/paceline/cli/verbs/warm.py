"""`paceline warm`: processes that have imported a framework, and wait for the next job."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from paceline.backends.base import Warms, able
from paceline.cli.flags.option import Option, SectionedCommand, Whole, in_section, output_option
from paceline.cli.flags.where import backend, where_options
from paceline.cli.terminal.tables import Column, show
from paceline.cli.terminal.write import say_once
from paceline.job.errors import UserError
from paceline.job.quantities import duration, show_duration, show_size

if TYPE_CHECKING:
    from paceline.contract.messages import WarmWanted
    from paceline.job.job import WarmServer

_DEFAULT = "10m"


def _warm(
    *,
    framework: str | None,
    preload: str | None,
    ranks: int | None,
    seconds: str | None,
    listed: bool,
    stop: bool,
    output: str,
) -> None:
    """Import a framework once, and keep that process: `paceline run` and `submit` start from it at once.

    It is used if a job would import the same, in the same environment; `run` says why it is not. It ends when no job
    has used it for a while, when one of the files that it has imported changes, and when memory is short.
    """
    here = able(backend(), Warms)
    if listed or stop:
        asked = {"--framework": framework, "--preload": preload, "-n": ranks, "--for": seconds}
        flag = "--stop" if stop else "--list"
        for name, value in asked.items():
            if value is not None:
                raise UserError(f"{flag} and {name} contradict each other; give one of them")
        if listed and stop:
            raise UserError("--list and --stop contradict each other; give one of them")
        found = here.ask_warm("stop" if stop else "describe", say_once)
        if stop and output == "table":
            click.echo("\n".join(f"process {it.pid} on {it.machine} has ended" for it in found) or "none was kept warm")
        else:
            _show(found, output)
        return
    try:
        period = duration(seconds or _DEFAULT, usual="m", zero=f"give a time such as {_DEFAULT}")
    except ValueError as error:
        raise UserError(f"--for: {error}") from None
    assert period is not None
    wanted: WarmWanted = {
        "framework": framework or "torch", "preload": [name for name in (preload or "").split(",") if name],
        "ranks": ranks or 1, "seconds": period,
    }  # fmt: skip
    _show(here.start_warm(wanted, say_once), output)


def _show(servers: list[WarmServer], output: str) -> None:
    columns: list[Column[WarmServer]] = [
        Column("MACHINE", lambda it: it.machine),
        Column("PID", lambda it: str(it.pid)),
        Column("IMPORTED", lambda it: ",".join(it.preload) or None, is_text=True),
        Column("MEMORY", lambda it: show_size(it.memory)),
        Column("JOBS", lambda it: str(it.jobs)),
        Column("AGE", lambda it: show_duration(it.age)),
        Column("ENDS IN", lambda it: show_duration(it.ends_in)),
        Column("PYTHON", lambda it: " ".join(it.python), wide=True, is_text=True),
    ]
    show(servers, columns, output, asdict)


warm = SectionedCommand(
    "warm",
    callback=_warm,
    params=[
        *where_options(),
        *in_section(
            "Process",
            Option(["--framework"], metavar="NAME", help="What to import.  [default: torch]"),
            Option(["--preload"], metavar="MODULE,…", help="More modules to import."),
            Option(
                ["-n", "--nproc-per-node", "ranks"],
                type=Whole(1),
                metavar="N",
                help="For jobs of so many ranks on a machine; torch serves any number.  [default: 1]",
            ),
            Option(
                ["--for", "seconds"],
                metavar="10m",
                help=f"End the process when it has started no job for this time.  [default: {_DEFAULT}]",
            ),
            Option(["--list", "listed"], is_flag=True, help="Show the processes that are kept warm."),
            Option(["--stop"], is_flag=True, help="End these processes; jobs that they have started go on."),
        ),
        output_option(),
    ],
)
