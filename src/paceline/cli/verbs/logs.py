"""`paceline logs`: what the ranks of a job wrote, or write."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from typing import TYPE_CHECKING

import click

from paceline.backends.base import Incomplete, LogQuery
from paceline.cli.flags import completion
from paceline.cli.flags.option import Option, SectionedCommand, Whole, in_section
from paceline.cli.flags.selection import how_to_resume, outcome, rank_of
from paceline.cli.flags.selection import known as jobs_named
from paceline.cli.flags.where import OF_JOBS, backend, where_options
from paceline.cli.terminal.write import ColoursOnly, ended_by_signals, say, say_once, write
from paceline.job.errors import UserError
from paceline.job.quantities import moment, show_time
from paceline.job.text import pattern

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from paceline.backends.base import LogLines

    Edit = Callable[[LogLines, bytes], bytes]  # whole lines with their ends, to what is shown of them

_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_ERASED = re.compile(rb"[^\n]*\r(?=[^\n])")  # what a progress bar has drawn over
_BLOCKED_LINE_END = re.compile(rb"\r+(?=\n|\Z)")


def _logs(
    job: str,
    *,
    instances: tuple[str, ...],
    every: bool,
    follow: bool,
    tail: int | None,
    since: str | None,
    attempt: int | None,
    grep: str | None,
    timestamps: bool,
    unchanged: bool,
) -> int:
    """Show what the ranks of JOB wrote: rank 0, unless -i or --all choose others.

    The lines of several ranks come in the order of time, each with the prefix `[rank N]`. The exit code is 0,
    or with --follow that of the job. Ctrl-C ends --follow, not the job. On a terminal only colours pass, unless --raw.
    """
    (known,) = jobs_named([job], warns=True)
    if every and instances:
        raise UserError("--all and -i contradict each other; give one of them")
    if follow:
        backend().ask_on(say)
    ranks = None if every else tuple(dict.fromkeys(rank_of(known, text) for text in instances)) or (0,)
    several = (known.ranks > 1) if ranks is None else len(ranks) > 1
    edits = _edits(several, grep, timestamps)
    raw = follow and not several and not edits and sys.stdout.isatty()
    query = LogQuery(ranks, follow, tail, _since(since), attempt, timestamps, raw)
    missing: list[Incomplete] = []
    from paceline.backends.functions import without_results  # with pickle and the like

    lines = _until_incomplete(without_results(backend().logs(job, query), known), missing)
    if follow and known.waiting is not None:
        say(f"job {job}: {known.waiting}")
    try:
        with ended_by_signals(), contextlib.closing(lines):
            nothing = _show(
                lines, edits, raw, ColoursOnly(sys.stdout) if sys.stdout.isatty() and not unchanged else None
            )
    except BrokenPipeError:  # the reader of our output has ended, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except OSError as error:
        what = "write the logs" if error.filename is None else f"read {error.filename}"
        raise UserError(f"cannot {what}: {error.strerror}") from None
    (known,) = jobs_named([job])
    if missing and follow and not known.is_over:  # nobody knows how it goes on
        raise missing[0]
    for line in str(*missing).splitlines():
        say_once(line)
    if nothing and not known.is_over and known.state in ("PENDING", "STARTING") and known.attempt == 0 and not follow:
        say(f"job {job} is {known.state}, and no rank of it has written yet")
    if not follow or not known.is_over:
        return 0
    if known.state != "SUCCEEDED":
        say(outcome(known))
        if (how := how_to_resume(known, backend().where_of(known.name))) is not None:
            say(how)
    return 1 if known.exit_code is None else known.exit_code  # None: its agent was killed


def _until_incomplete(lines: Iterable[LogLines], missing: list[Incomplete]) -> Generator[LogLines, None, None]:
    """The lines; `missing` gets the error with which they end, if some are missing."""
    try:
        yield from lines
    except Incomplete as error:
        missing.append(error)


def _since(text: str | None) -> float | None:
    try:
        return None if text is None else moment(text)
    except ValueError as error:
        raise UserError(f"--since {error}") from None


def _edits(several: bool, grep: str | None, timestamps: bool) -> list[Edit]:
    """What is done with lines before they are shown."""
    edits: list[Edit] = []
    if several:
        edits.append(lambda _, lines: _drawn(lines))
    if grep is not None:
        search = pattern(grep, f"--grep {grep!r}").search
        edits.append(lambda _, lines: b"".join(filter(search, _LINE.findall(lines))))
    if timestamps or several:
        edits.append(lambda it, lines: _behind(_prefix(it, several, timestamps), lines))
    return edits


def _drawn(lines: bytes) -> bytes:
    """What a terminal would show of each line, roughly: what follows its last carriage return."""
    return _ERASED.sub(b"", _BLOCKED_LINE_END.sub(b"", lines)) if b"\r" in lines else lines


def _prefix(it: LogLines, several: bool, timestamps: bool) -> bytes:
    stamp = f"{show_time(it.time)} " if timestamps else ""
    return f"{stamp}[rank {it.rank}] ".encode() if several else stamp.encode()


def _behind(prefix: bytes, lines: bytes) -> bytes:
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + lines[-1:] if lines else lines


def _show(lines: Iterable[LogLines], edits: list[Edit], raw: bool, colours: ColoursOnly | None) -> bool:
    """Write them out, and say on stderr when another attempt begins; returns whether there were none."""
    attempt, is_open, before = None, False, None
    try:
        for it in lines:
            text = it.text
            for edit in edits:
                text = edit(it, text)
            goes_on = raw or (not edits and before == (it.rank, it.stream))  # a piece of a very long line
            if colours is not None and (before != (it.rank, it.stream) or it.attempt != attempt):
                write(1, colours.end())
            before = it.rank, it.stream
            if is_open and (not goes_on or it.attempt != attempt):  # the last line of a log had no end
                write(1, b"\n")
                is_open = False
            if attempt is not None and it.attempt > attempt:
                say(f"attempt {it.attempt} begins")
            attempt = it.attempt
            if text:
                is_open = not text.endswith(b"\n")
                write(1, text if colours is None else colours.feed(text))
    finally:
        if colours is not None:
            write(1, colours.end())
    if is_open and edits:
        write(1, b"\n")
    return attempt is None


logs = SectionedCommand(
    "logs",
    callback=_logs,
    params=[
        click.Argument(["job"], **OF_JOBS),
        *where_options(),
        *in_section(
            "Ranks",
            Option(
                ["-i", "--instance", "instances"],
                multiple=True,
                metavar="N|master-0|worker-N",
                shell_complete=completion.instances,
                help="A rank, by number or by its instance's name; repeatable.  [default: 0]",
            ),
            Option(["--all", "every"], is_flag=True, help="All ranks."),
        ),
        *in_section(
            "Lines",
            Option(
                ["--attempt"],
                type=Whole(0),
                metavar="K",
                help="Output of this attempt, counted from 0.  [default: the last one]",
            ),
            Option(
                ["-t", "--tail"],
                type=Whole(0),
                metavar="N",
                help="Only the last N lines, of each node if there are several.",
            ),
            Option(["--since"], metavar="10m|TIME", help="Only output since then: a duration, or an ISO 8601 time."),
            Option(["--grep"], metavar="RE", help="Only lines with a match; lines above 1 MiB are searched in pieces."),
        ),
        *in_section(
            "Output",
            Option(["-f", "--follow"], is_flag=True, help="Follow the output until the job ends, over restarts too."),
            Option(
                ["--raw", "unchanged"],
                is_flag=True,
                help="On a terminal, pass on all control sequences, not only colours; to a pipe or file they always "
                "go.",
            ),
            Option(["--timestamps"], is_flag=True, help="Begin each line with the time it was written."),
        ),
    ],
)
