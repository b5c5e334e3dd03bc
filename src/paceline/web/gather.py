"""Asks a backend for what the page and a report show of a job and of machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from paceline.backends.base import History, LogQuery, Recorded, able
from paceline.backends.story import story
from paceline.job.errors import UserError
from paceline.job.secret_values import looks_secret, without_passwords

from .views import job_view, last_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.backends.base import Backend
    from paceline.job.job import Job
    from paceline.job.spec import JobSpec

    from .views import JobView

_NODE_LINES = 4000  # last lines of a node, of which each rank's are taken
_LONGEST = 4000  # bytes of a line that are shown: one with a bar of progress may have any number

_T = TypeVar("_T")


def gathered(job: Job, there: Backend, lines: int) -> JobView:
    """The view of a job; what its backend does not give is said in it."""
    missing: list[str] = []

    def known(what: str, ask: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return ask()
        except UserError as error:
            missing.append(f"{what}: {error}")
            return otherwise

    nothing: list[dict[str, Any]] = []
    happened = known("events", lambda: there.events(job.name), nothing)
    history = known("history", lambda: able(there, Recorded).history(job.name), History([]))
    file = known("job file", lambda: job_file(there.spec(job.name)), "")
    ends: list[tuple[int, bytes]] = []
    if lines:
        known("logs", lambda: ends.extend(_ends(job, there)), None)
    logs = last_lines(ends, lines)
    return job_view(job, story(job, happened), history, logs=logs, file=file, missing=missing)


def _ends(job: Job, there: Backend) -> Iterator[tuple[int, bytes]]:
    for found in there.logs(job.name, LogQuery(ranks=None, tail=_NODE_LINES)):
        yield found.rank, b"\n".join(map(_shortened, found.text.split(b"\n")))


def _shortened(line: bytes) -> bytes:
    """The end of a long line: what was written last."""
    return line if len(line) <= _LONGEST else "…".encode() + line[-_LONGEST:]


def job_file(spec: JobSpec, *, for_others: bool = True) -> str:
    """A job as a job file; for others without what looks like a secret."""
    import yaml

    left_out = ("name", "resume_from", "detached", "rendezvous")
    shown: dict[str, Any] = {key: it for key, it in spec.dumped(only_changed=True).items() if key not in left_out}
    if not for_others:
        return str(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True))
    if "env" in shown:
        shown["env"] = {name: "…" if looks_secret(name, it) else it for name, it in shown["env"].items()}
    return without_passwords(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True))
