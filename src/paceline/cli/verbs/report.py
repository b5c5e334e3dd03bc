"""`paceline report`: all about jobs in one file, for people who were not there."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import click

from paceline.cli.flags.option import Option, SectionedCommand, Whole, new_file
from paceline.cli.flags.selection import known
from paceline.cli.flags.where import OF_JOBS, backend, where_options
from paceline.cli.terminal.write import ended_by_signals, say
from paceline.job.errors import UserError

_LINES = 30
_MOST_LINES = 10_000


def _report(names: tuple[str, ...], *, file: str | None, lines: int) -> None:
    """Write all about JOB into one HTML file, which needs no network: it can be sent, and kept.

    State and events, why it failed or is slow, metrics, what each rank spent its time on, what it used, the last lines
    of each rank, the job file and the code. Several jobs are compared.
    """
    from paceline.web.gather import gathered
    from paceline.web.report import is_report, report

    names = tuple(dict.fromkeys(names))
    path = Path(file or f"{names[0]}.html")
    if file != "-":
        new_file("-o", str(path))
        if path.exists() and not (path.is_file() and is_report(path)):
            raise UserError(f"-o {path} exists, and is no report; choose another file")
    jobs = known(names, warns=True)
    with ended_by_signals():
        views = [gathered(job, backend(), lines) for job in jobs]
        text = report(views).encode()
    if file == "-":
        sys.stdout.buffer.write(text)
    else:
        _write(path, text)
    for view in views:
        for line in view["missing"]:
            say(f"{view['job']['name']}: {line}" if len(views) > 1 else line)


def _write(path: Path, text: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(text)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(f"-o {path}: {error.strerror}; choose another file") from None
    click.echo(path)


report = SectionedCommand(
    "report",
    callback=_report,
    params=[
        click.Argument(["names"], metavar="JOB…", nargs=-1, required=True, **OF_JOBS),
        *where_options(),
        Option(["-o", "--output", "file"], metavar="FILE", help="Where it goes; - for stdout.  [default: JOB.html]"),
        Option(
            ["-t", "--tail", "lines"],
            metavar="N",
            type=Whole(0, _MOST_LINES),
            default=_LINES,
            help=f"Last lines of each rank.  [default: {_LINES}]",
        ),
    ],
)
