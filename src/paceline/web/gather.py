"""Asks a backend for what the page and a report show of a job and of machines."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, TypeVar

from paceline.backends.base import History, LogQuery, Recorded, able
from paceline.backends.story import story
from paceline.job.errors import UserError
from paceline.job.secret_values import looks_secret, without_passwords

from .views import job_view, last_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paceline.backends.base import Backend
    from paceline.contract.records import EventRecord
    from paceline.job.job import Job
    from paceline.job.spec import JobSpec

    from .views import JobView

_NODE_LINES = 4000  # last lines of a node, of which each rank's are taken
_LONGEST = 4000  # bytes of a line that are shown: one with a bar of progress may have any number

_NAMED = re.compile(r"-+[^\d.]|[\w.+~/]+=")  # words that name an argument: flags, and Hydra's NAME=VALUE

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

    nothing: list[EventRecord] = []
    no_spec: dict[str, object] = {}
    happened = known("events", lambda: there.events(job.name), nothing)
    history = known("history", lambda: able(there, Recorded).history(job.name), History([]))
    spec = known("job file", lambda: shown_spec(there.spec(job.name)), no_spec)
    ends: list[tuple[int, bytes]] = []
    if lines:
        known("logs", lambda: ends.extend(_ends(job, there)), None)
    logs = last_lines(ends, lines)
    file, settings = as_file(spec) if spec else "", flattened(spec)
    return job_view(job, story(job, happened), history, logs=logs, file=file, settings=settings, missing=missing)


def _ends(job: Job, there: Backend) -> Iterator[tuple[int, bytes]]:
    for found in there.logs(job.name, LogQuery(ranks=None, tail=_NODE_LINES)):
        yield found.rank, b"\n".join(map(_shortened, found.text.split(b"\n")))


def _shortened(line: bytes) -> bytes:
    """The end of a long line: what was written last."""
    return line if len(line) <= _LONGEST else "…".encode() + line[-_LONGEST:]


def job_file(spec: JobSpec, *, for_others: bool = True) -> str:
    """A job as a job file; for others without what looks like a secret."""
    shown = shown_spec(spec, for_others=for_others)
    return as_file(shown) if for_others else _yaml(shown)


def shown_spec(spec: JobSpec, *, for_others: bool = True) -> dict[str, object]:
    """What a job file says of a job; for others without what looks like a secret."""
    left_out = ("name", "resume_from", "detached", "rendezvous")
    shown: dict[str, object] = {key: it for key, it in spec.dumped(only_changed=True).items() if key not in left_out}
    if for_others and "env" in shown:
        shown["env"] = {name: "…" if looks_secret(name, it) else it for name, it in spec.env.items()}
    return shown


def as_file(shown: Mapping[str, object]) -> str:
    """The job file."""
    return without_passwords(_yaml(shown))


def _yaml(shown: Mapping[str, object]) -> str:
    import yaml

    return str(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True))


def flattened(shown: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """The settings of a job file as names and values: `env.NAME`, `args.--lr`, and lists as a shell would read them."""
    found: dict[str, str] = {}
    for key, value in shown.items():
        words = list(map(str, value)) if isinstance(value, (list, tuple)) else None
        inner = _arguments(words) if words is not None and key == "args" and not prefix else value
        if isinstance(inner, dict):
            found.update(flattened(inner, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = without_passwords(str(value) if words is None else shlex.join(words))
    return found


def _arguments(words: Sequence[str]) -> dict[str, str]:
    """Arguments by their names; those without one by their number, and one that is given often with all its values."""
    found: dict[str, list[str]] = {}
    place, name = 0, ""  # whose value the next word may be
    for word in words:
        if _NAMED.match(word):
            name, sign, value = word.partition("=")
            found.setdefault(name, []).append(value if sign else "")
            name = "" if sign else name
        elif name:
            found[name][-1] = f"{found[name][-1]} {word}".strip()
        else:
            place += 1
            found[str(place)] = [word]
    return {name: ", ".join(values) or "yes" for name, values in found.items()}
