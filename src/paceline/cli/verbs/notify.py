"""`paceline notify`: notices of jobs by webhooks and by mail."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import click

from paceline.cli.flags.option import Option, SectionedCommand
from paceline.cli.terminal.write import say
from paceline.job.errors import UserError
from paceline.job.quantities import duration_text
from paceline.job.text import printable

if TYPE_CHECKING:
    from paceline.job.settings import Receiver
    from paceline.notify.delivery import Way


def _notify(*, names: tuple[str, ...], test: bool, dry_run: bool) -> int:
    """Send notices when jobs of any target end, fail, hang or are slow, until Ctrl-C.

    The settings say who gets them: tables such as [notify.team], with webhook_file or mail.
    """
    from paceline.notify.service import Service, receivers

    if test and dry_run:
        raise UserError("--test sends a notice, and --dry-run sends none; leave one out")
    if names and not (test or dry_run):
        raise UserError(f"{names[0]}: receivers are named for --test and --dry-run; without them, all get notices")
    to = receivers(names)
    if test:
        return _test(to)
    service = Service(to, tell=_tell, warn=_warn, dry_run=dry_run)
    for name, (receiver, way) in to.items():
        say(f"{name} ({receiver.format if not receiver.mail else 'mail'}, {way.where}) gets: {_wanted(receiver)}")
    say("nothing is sent, notices are printed; Ctrl-C ends it" if dry_run else "watching; Ctrl-C ends it")
    has_begun = threading.Event()

    def end(*_: object) -> None:
        if has_begun.is_set():
            raise KeyboardInterrupt  # a second one: at once
        has_begun.set()
        service.end()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    with contextlib.suppress(KeyboardInterrupt):
        service.run()
    return 0


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _tell(text: str) -> None:
    """A line about what was sent, with the time; a notice of a dry run has several lines."""
    click.echo(f"{_now()} {text}")
    sys.stdout.flush()


def _warn(text: str) -> None:
    say(f"{_now()} {text}")


def _wanted(receiver: Receiver) -> str:
    words = [f"slow for {duration_text(receiver.slow_for)}" if it == "slow" else it for it in receiver.on]
    jobs = f"; jobs on {', '.join(receiver.targets)}" if receiver.targets is not None else ""
    labels = "".join(f"; label {name}={value}" for name, value in receiver.labels.items())
    return f"{', '.join(words)}{jobs}{labels}"


def _test(to: dict[str, tuple[Receiver, Way]]) -> int:
    from paceline.notify.notice import trial_notice

    failed = 0
    for name, (_, way) in to.items():
        outcome = way.send([trial_notice()])
        failed += bool(outcome.problem)
        if outcome.problem:
            say(f"{name}: {outcome.problem}")
        else:
            click.echo(printable(f"{name}: sent to {way.where}"))
    return int(bool(failed))


notify = SectionedCommand(
    "notify",
    callback=_notify,
    params=[
        click.Argument(["names"], metavar="[RECEIVER]...", nargs=-1),
        Option(["--test"], is_flag=True, help="Send one test notice to each RECEIVER, all by default, and end."),
        Option(["--dry-run"], is_flag=True, help="Print the notices, and send none."),
    ],
)
