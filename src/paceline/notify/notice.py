"""What a notice says."""

from __future__ import annotations

import shlex
import socket
import time
from typing import TYPE_CHECKING

import msgspec

from paceline.backends.facts import facts
from paceline.backends.registry import HERE
from paceline.job.quantities import show_duration, show_time
from paceline.job.shown import progress_of
from paceline.job.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.job.job import Job

_LONGEST = 400  # characters of a line
_MOST_TITLES = 20  # of notices that are merged into one
_HAPPENED = {"failed": "failed", "ended": "has ended", "hung": "hangs", "slow": "is slow"}
_COMMANDS = {"failed": "why", "ended": "logs", "hung": "why", "slow": "why"}


class Notice(msgspec.Struct, frozen=True):
    """A notice; these are the keys of the format `json`, too.

    Attributes:
        event: failed, ended, hung, slow, or test.
        title: in one line.
        text: the title, and more lines.
        time: of the notice, in seconds since the epoch; RFC 3339 in JSON.
        duration: seconds that the job has run.
        rank: that failed first, or keeps the others waiting.
        node: its host.
        step: of the training, in its epoch, both as far as the library has told them.
        loss: the last one that was logged.
        command: shows more.
    """

    event: str
    title: str
    text: str
    time: float
    job: str | None = None
    target: str | None = None
    state: str | None = None
    exit_code: int | None = None
    cause: str | None = None
    error: str | None = None
    advice: str | None = None
    duration: float | None = None
    rank: int | None = None
    node: str | None = None
    epoch: int | None = None
    step: int | None = None
    loss: float | None = None
    labels: dict[str, str] = {}
    command: str | None = None

    def to_dict(self) -> dict[str, object]:
        """As JSON has it."""
        return {**msgspec.to_builtins(self), "time": show_time(self.time)}


def notice(event: str, job: Job, where: str, now: float) -> Notice:
    """The notice of an event; `where` are the flags that find the job, with a space before them."""
    known = facts(job, lambda: (), where)
    found, loss = known["diagnosis"], known["loss"]
    error = {"hung": job.waiting, "slow": "; ".join(job.slow)}.get(event, job.error)
    is_wrong = event in ("failed", "hung")
    cause = "hang" if event == "hung" else found["kind"] if found and event == "failed" else None
    rank, node = (found["rank"], found["node"]) if found and is_wrong else (None, None)
    duration = job.duration(now)
    command = f"paceline {_COMMANDS[event]}{where} {shlex.quote(job.name)}"
    place = f"{job.backend} ({socket.gethostname()})" if job.backend == HERE else job.backend
    state = f" ({job.state})" if event == "ended" else ""
    title = _line(f"paceline: job {job.name} {_HAPPENED[event]}{state} on {place}")
    progress = ", ".join(
        it for it in (progress_of(job), f"{loss['name']} {loss['value']}" if loss and loss["value"] is not None else "")
        if it
    )  # fmt: skip
    ran = "" if duration is None else f"{'ran' if job.is_over else 'has run'} for {show_duration(duration)}"
    at = "" if rank is None else f"rank {rank}{f' on {node}' if node else ''}"
    lines = [
        (error or ""),
        f"advice: {job.advice}" if job.advice and is_wrong else "",
        f"{'first to fail' if event == 'failed' else 'look at'}: {at}" if at else "",
        "; ".join(it for it in (ran, progress) if it),
        f"more: {command}",
    ]
    step = progress_of(job) and job.progress
    return Notice(
        event=event, title=title, text="\n".join((title, *(_line(it) for it in lines if it))), time=now,
        job=_line(job.name), target=_line(job.backend), state=job.state, exit_code=job.exit_code,
        cause=cause, error=_line(error) if error else None,
        advice=_line(job.advice) if job.advice and is_wrong else None,
        duration=None if duration is None else round(duration, 1), rank=rank, node=node,
        epoch=step["epoch"] + 1 if step else None, step=step["step"] if step else None,
        loss=loss["value"] if loss and loss["is_finite"] else None,
        labels={_line(key): _line(value) for key, value in job.labels.items()}, command=_line(command),
    )  # fmt: skip


def trial_notice() -> Notice:
    """What `paceline notify --test` sends."""
    title = f"paceline: this is a test from {socket.gethostname()}"
    return Notice("test", title, f"{title}\npaceline notify reaches you here.", time.time())


def merged(notices: Sequence[Notice]) -> str:
    """The text of several notices in one message."""
    first, *others = notices
    if not others:
        return first.text
    titles = [f"- {it.title.removeprefix('paceline: ')}" for it in others[:_MOST_TITLES]]
    more = len(others) - len(titles)
    return "\n".join((first.text, f"and {len(others)} more:", *titles, *([f"and {more} others"] if more else ())))


def _line(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"
