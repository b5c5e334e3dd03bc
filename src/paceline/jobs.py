"""Jobs from Python: what the command line does, with the same refusals.

from paceline import jobs

job = jobs.submit("train.py", nproc=2)
jobs.wait(job.name)

accuracy = jobs.submit(train, args=(0.01,), nproc=2, on="lab").result()

Without `on`, a new job is on this machine, or on `hosts`; a job is looked for where it was submitted to from here. What
a user can correct raises `UserError`, with one line; for several hosts one for each.
"""

from __future__ import annotations

import contextlib
import functools
import html
import inspect
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.backends import again, everywhere
from paceline.backends.base import (
    Elastic,
    Forwards,
    Incomplete,
    LogLines,
    LogQuery,
    Metered,
    Moves,
    Prepared,
    Suspends,
    TensorBoards,
    able,
)
from paceline.backends.hosts import in_list
from paceline.backends.registry import kinds_of_hosts, load, on_hosts
from paceline.backends.story import story
from paceline.job import job as records
from paceline.job.errors import UserError
from paceline.job.flags import ELSEWHERE
from paceline.job.job import Instance, Node, Usage, Volume
from paceline.job.model import dotted
from paceline.job.quantities import duration, moment
from paceline.job.secret_values import notes_on_secrets
from paceline.job.shown import ago, lasted, reason
from paceline.job.spec import Code, JobSpec, Mount, Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.backends.base import Backend

__all__ = [
    "Code", "Incomplete", "Instance", "Job", "JobSpec", "Jobs", "LogLines", "LogQuery", "Mount", "Node", "Prepared",
    "Rendezvous", "Usage", "UserError", "Volume", "delete", "events", "get", "list_jobs", "logs", "nodes", "prepare",
    "resubmit", "resume", "scale", "scalein", "scaleout", "stop", "stop_tensorboard", "submit", "suspend",
    "tensorboard", "top", "wait",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


_MOST = 60  # characters of a text that the repr of a job has


class Job(records.Job):
    """What was known of a job when it was looked at; `get` looks again, and so do `result` and `results`."""

    _there: Backend

    @classmethod
    def _of(cls, job: records.Job, there: Backend) -> Job:
        found = object.__new__(cls)
        vars(found).update(vars(job), _there=there)
        return found

    def result(self, seconds: float | str | None = None) -> Any:
        """What the function of this job has returned on rank 0; waits until the job has ended.

        It comes in the log of the rank, pickled, with up to 4 MiB. Unpickling may run code of the job.

        Args:
            seconds: to wait at most; a text has a unit, such as "10m".

        Raises:
            Exception: the one that the first failing rank has raised, with its own traceback as the cause.
            UserError: it has not ended within this time, has failed otherwise, or is no function.
        """
        return self._results(seconds, every=False)[0]

    def results(self, seconds: float | str | None = None) -> list[Any]:
        """What the function has returned on each rank, in rank order; see `result`."""
        return self._results(seconds, every=True)

    def _results(self, seconds: float | str | None, *, every: bool) -> list[Any]:
        from paceline.backends.functions import results

        if not self._there.wait([self.name], _patience(seconds)):
            raise UserError(f"job {self.name} has not ended within {_patience(seconds):g} s; ask again later")
        found = _known(self.name, self._there)
        vars(self).update(vars(found))
        return results(self._there, found, every=every)

    def __repr__(self) -> str:
        texts = {title: text if len(text) <= _MOST else f"{text[:_MOST]}…" for title, text in _cells(self).items()}
        cells = (f"{title.lower()}={text}" for title, text in texts.items() if title not in ("JOB", "STATE"))
        return f"<Job {self.name} {self.state} {' '.join(cells)}>"

    def _repr_html_(self) -> str:
        return Jobs([self])._repr_html_()


class Jobs(list[Job]):
    """Jobs, which a notebook shows as a table, and Python one a line."""

    def __repr__(self) -> str:
        lines = ",\n ".join(map(repr, self))
        return f"[{lines}]"

    def _repr_html_(self) -> str:
        rows = [_cells(job) for job in self]
        titles = list(dict.fromkeys(title for row in rows for title in row)) or ["JOB"]

        def line(tag: str, texts: Sequence[str]) -> str:
            return f"<tr>{''.join(f'<{tag}>{html.escape(text)}</{tag}>' for text in texts)}</tr>"

        body = "".join(line("td", [row.get(title, "") for title in titles]) for row in rows)
        return f"<table><thead>{line('th', titles)}</thead><tbody>{body}</tbody></table>"


def _cells(job: Job) -> dict[str, str]:
    """What is shown of a job in short: title → text."""
    found = {
        "JOB": job.name,
        "STATE": job.state,
        "TARGET": job.backend,
        "RANKS": str(job.ranks),
        "AGE": ago(job.created),
        "DURATION": lasted(job),
        "REASON": reason(job),
    }
    return {title: text for title, text in found.items() if text}


# -- start -------------------------------------------------------------------------------------------------------------


def prepare(spec: JobSpec, on: str | None = None) -> Prepared:
    """Find out what `submit` would do; starts nothing.

    Raises:
        UserError: the job cannot run, or its name is taken.
    """
    if not isinstance(spec, JobSpec):
        raise UserError(f"{spec!r} is no JobSpec; write for example JobSpec(script='train.py')")
    _warn_of_secrets(spec)
    return (load(spec.backend) if on is None else _load(on)).prepare(spec)


def submit(
    what: JobSpec | str | os.PathLike[str] | Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nproc: int | None = None,
    on: str | None = None,
    hosts: str | Sequence[str] | None = None,
    **fields: Any,
) -> Job:
    """Start a job that goes on by itself.

    A function runs on each rank, in the folder in which it was submitted if there is one of that path, else in its
    own. `result` of the job is what it returns. With cloudpickle any function will do, also one of a notebook; the
    ranks need the same version of Python, and the modules that it imports.

    Args:
        what: a complete specification, or a script, or a function.
        args: arguments of the script or function.
        kwargs: named arguments of the function.
        nproc: ranks on each node; a specification has its own.
        on: a target of the settings; `local` is this machine.
        hosts: that ssh reaches, as `-H` takes them: "node1:2,node2:2".
        fields: of a `JobSpec`, for a script or function, such as `devices=2` or `time_limit="2h"`.

    Raises:
        UserError: it cannot run, or its name is taken.
    """
    if isinstance(what, JobSpec):
        if args or kwargs or nproc is not None or fields:
            raise UserError("a JobSpec is complete; set the other arguments there")
        return _started(what, _place(on, hosts) or load(what.backend))
    if not isinstance(what, (str, os.PathLike)) and not callable(what):
        raise UserError(f"{what!r} is no JobSpec, script or function; give one of them")
    if not isinstance(kwargs or {}, Mapping):
        raise UserError("kwargs: write the arguments with their names, such as submit(train, kwargs={'lr': 0.1})")
    args = _listed_args(args)
    given = {**fields, **_counts(nproc, hosts, fields)}
    there = _place(on, hosts) or load(given.get("backend"))
    if not callable(what):
        if kwargs:
            raise UserError("kwargs are for functions; give a script args")
        return _started(JobSpec(**{**given, "script": os.fspath(what), "args": tuple(map(str, args))}), there)
    if taken := [name for name in ("script", "module", "command", "code") if name in fields]:
        raise UserError(f"{taken[0]}: a function is all that such a job runs; leave it out")
    from paceline.backends.functions import write

    name = str(getattr(what, "__name__", "function"))
    with contextlib.suppress(ValueError):  # of what is written in C nobody knows what it takes
        try:
            inspect.signature(what).bind(*args, **(kwargs or {}))
        except TypeError as error:
            raise UserError(f"{name}: {error}; correct args and kwargs") from None
    with tempfile.TemporaryDirectory(prefix="paceline-function-") as folder:
        given.update(write(functools.partial(what, *args, **(kwargs or {})), name, Path(folder)))
        return _started(JobSpec(**given), there)


def resubmit(
    name: str | records.Job,
    *,
    nproc: int | None = None,
    on: str | None = None,
    hosts: str | Sequence[str] | None = None,
    fresh: bool = False,
    **changes: Any,
) -> Job:
    """Start a job again; it resumes from its newest checkpoint.

    Args:
        name: of the job, which has ended.
        nproc: ranks on each node.
        on: where it goes on; by default where it was.
        hosts: likewise, as `-H` takes them.
        fresh: begin anew.
        changes: fields of its `JobSpec`; `env`, `labels`, `secrets` and `options` are added to those that it has.

    Raises:
        UserError: there is no such job, it has not ended, or it cannot run so.
    """
    there, prepared = prepare_again(name, nproc=nproc, on=on, hosts=hosts, fresh=fresh, **changes)
    return _started(prepared.spec, there, prepared)


def prepare_again(
    name: str | records.Job,
    *,
    nproc: int | None = None,
    on: str | None = None,
    hosts: str | Sequence[str] | None = None,
    fresh: bool = False,
    **changes: Any,
) -> tuple[Backend, Prepared]:
    """Find out what `resubmit` would do, and where; starts nothing.

    Raises:
        UserError: there is no such job, it has not ended, or it cannot run so.
    """
    there = _place(on, hosts)
    name, here = _at(name, None)
    if there is not None and there.describe([name]).jobs:
        here = there
    old = _known(name, here)
    added = {key: changes[key] for key in ("env", "labels", "options", "secrets") if changes.get(key) is not None}
    JobSpec(script="", **added)  # refuses what cannot be added
    if "args" in changes:
        changes["args"] = tuple(map(str, _listed_args(changes["args"])))
    again.refuse_running(old, here)
    before = here.spec(name)
    changes |= {**_counts(nproc, hosts, changes), "fresh": fresh, "resume_from": name}
    changes.setdefault("name", again.next_name(old, before))
    if there is None or there is here:
        return here, here.prepare(again.changed(here.replaced(before, changes), changes, dotted))
    export = able(here, Moves).export(name, fresh=fresh)
    destination = able(there, Moves)
    spec = again.changed(again.kept_there(before, here, there, _warn), changes, dotted)
    again.refuse_nodes_here(spec, there)
    return there, destination.prepare_moved(spec, export)


def _started(spec: JobSpec, there: Backend, prepared: Prepared | None = None) -> Job:
    _warn_of_secrets(spec)
    return Job._of(there.start(prepared or there.prepare(spec), NoProgress()), there)


def _place(on: str | None, hosts: str | Sequence[str] | None) -> Backend | None:
    """What these arguments name; None if they name nothing."""
    if hosts is None:
        return None if on is None else _load(on)
    if on is not None:
        raise UserError("on and hosts both say where; give one")
    return on_hosts(min(kinds_of_hosts()), {"hosts": _listed(hosts)})


def _listed_args(args: Any) -> Sequence[Any]:
    if not isinstance(args, (list, tuple)):
        raise UserError("args: write the arguments as a list, such as submit(train, [0.1])")
    return args


def _listed(hosts: str | Sequence[str]) -> list[str]:
    text = ",".join(_names(hosts))
    return [f"{name}:{slots or 1}" for name, slots in in_list("hosts", text)]


def _counts(nproc: int | None, hosts: str | Sequence[str] | None, fields: Mapping[str, Any]) -> dict[str, object]:
    """How many nodes and ranks: hosts say it, unless others do."""
    if nproc is not None and "ranks" in fields:
        raise UserError("nproc and ranks say the same; give one of them")
    for name in fields:
        if ELSEWHERE.get(name) == "ranks":
            raise UserError(f"{name}: unknown argument; did you mean nproc?")
    found: dict[str, object] = {} if nproc is None else {"ranks": nproc}
    if hosts is not None:
        found = {"nodes": len(_listed(hosts)), "ranks": "slots", **found}
    return {name: value for name, value in found.items() if name not in fields}


# -- look --------------------------------------------------------------------------------------------------------------


def list_jobs(on: str | None = None) -> Jobs:
    """The jobs of all targets, or of one, the newest first; warns of targets that do not answer.

    Raises:
        UserError: there is no such target, or the only one does not answer.
    """
    asked = everywhere.places() if on is None else [everywhere.Place(on, functools.partial(_load, on))]
    where: dict[tuple[str, float], Backend] = {}

    def note(there: Backend, jobs: list[records.Job]) -> None:
        where.update(((job.name, job.created), there) for job in jobs)

    found = everywhere.describe(asked, each=note)
    for line in found.warnings:
        _warn(line)
    return Jobs(Job._of(job, where[job.name, job.created]) for job in found.jobs)


def get(name: str | records.Job, on: str | None = None) -> Job:
    """What is known of a job.

    Raises:
        UserError: there is none of this name.
    """
    return _known(*_at(name, on))


def events(name: str | records.Job, on: str | None = None) -> list[dict[str, Any]]:
    """What happened to a job, in order: time, event, and details.

    Raises:
        UserError: there is no such job.
    """
    name, there = _at(name, on)
    return [dict(it) for it in story(_found(name, there), there.events(name))]


def logs(
    name: str | records.Job, query: LogQuery | None = None, on: str | None = None, *, follow: bool = False
) -> Iterator[LogLines]:
    """Lines that a job has written: rank 0's, unless the query says otherwise; with `follow` until it has ended.

    Args:
        name: of the job.
        query: which lines; its `since` may also be a time span, such as "10m", or a datetime.
        on: where the job is.
        follow: wait for more lines.

    Raises:
        UserError: there is no such job, or the query is wrong.
        Incomplete: after the last line, if those of some machine may be missing.
    """
    from paceline.backends.functions import without_results

    query, job = _checked(query or LogQuery()), get(name, on)
    return without_results(job._there.logs(job.name, replace(query, follow=follow or query.follow)), job)


def top(*names: str | records.Job, on: str | None = None) -> dict[str, Usage]:
    """What jobs use now, by name: cores, memory, accelerators; without names all that run.

    Raises:
        UserError: there is no such job, or it is not measured there.
    """
    jobs = [get(name, on) for name in names] or [job for job in list_jobs(on) if not job.is_over]
    found: dict[str, Usage] = {}
    for there in dict.fromkeys(job._there for job in jobs):
        found |= able(there, Metered).usage([job.name for job in jobs if job._there is there], _warn)
    return found


def nodes(on: str | None = None) -> list[Node]:
    """The machines of a target, or this one, and what is in use there.

    Raises:
        UserError: they are not measured there.
    """
    return able(_load(on), Metered).nodes(_warn)


def wait(name: str | records.Job, seconds: float | str | None = None, on: str | None = None) -> Job:
    """Come back when a job has ended, or the time is over; what is known of it then.

    Args:
        name: of the job.
        seconds: to wait at most; a text has a unit, such as "10m".
        on: where the job is.

    Raises:
        UserError: there is no such job.
    """
    name, there = _with(name, on)
    there.wait([name], _patience(seconds))
    return _known(name, there)


# -- act ---------------------------------------------------------------------------------------------------------------


def scaleout(
    name: str | records.Job, hosts: str | Sequence[str] | int | None = None, on: str | None = None
) -> list[str]:
    """Add machines to a running job: these, this number, or all that are possible; returns those that join.

    Raises:
        UserError: there is no such job, or one cannot join; then none does.
    """
    name, there = _with(name, on)
    return able(there, Elastic).scaleout(name, hosts if hosts is None or isinstance(hosts, int) else _names(hosts))


def scalein(name: str | records.Job, hosts: str | Sequence[str] | int, on: str | None = None) -> list[str]:
    """Remove these machines, or this number, from a running job; returns those that leave.

    Raises:
        UserError: there is no such job, or too few would be left.
    """
    name, there = _with(name, on)
    return able(there, Elastic).scalein(name, hosts if isinstance(hosts, int) else _names(hosts))


def scale(name: str | records.Job, nodes: int, on: str | None = None) -> Job:
    """Give a running job this number of machines: add some that are free, or remove some; returns what is known of it.

    Raises:
        UserError: there is no such job, it cannot have so many, or so few.
    """
    if type(nodes) is not int or nodes < 1:
        raise UserError(f"nodes: {nodes!r} is no number of machines; write for example 2")
    job = get(name, on)
    there = able(job._there, Elastic)
    if nodes > job.nodes:
        there.scaleout(job.name, nodes - job.nodes)
    elif nodes < job.nodes:
        there.scalein(job.name, job.nodes - nodes)
    return _known(job.name, job._there)


def tensorboard(name: str | records.Job, logdir: str | os.PathLike[str] | None = None, on: str | None = None) -> str:
    """The address of a job's TensorBoard, which is started if there is none.

    Args:
        name: of the job.
        logdir: what it shows; by default what the job has said, or its folder.
        on: where the job is.

    Raises:
        UserError: there is no such job, or its TensorBoard has no address here.
    """
    name, there = _with(name, on)
    if not isinstance(logdir, (str, os.PathLike, type(None))):
        raise UserError(f"logdir: {logdir!r} is no folder")
    if isinstance(there, Forwards):
        raise UserError(f"a command leads a port here to it: paceline tensorboard{there.where} {name}")
    return able(there, TensorBoards).open_tensorboard(name, None if logdir is None else os.fspath(logdir), _warn)


def stop_tensorboard(name: str | records.Job, on: str | None = None) -> bool:
    """End a job's TensorBoard; returns whether there was one."""
    name, there = _with(name, on)
    return able(there, TensorBoards).close_tensorboard(name)


def suspend(name: str | records.Job, on: str | None = None) -> None:
    """Have a job save, end its ranks and give its devices back, until it is resumed; its state is SUSPENDED then.

    Raises:
        UserError: there is no such job, or it cannot be suspended.
    """
    name, there = _with(name, on)
    able(there, Suspends).suspend([name])


def resume(name: str | records.Job, on: str | None = None) -> None:
    """Let a suspended job go on from its last checkpoint, once it has its devices again.

    Raises:
        UserError: there is no such job.
    """
    name, there = _with(name, on)
    able(there, Suspends).resume([name])


def stop(name: str | records.Job, now: bool = False, on: str | None = None) -> None:
    """Ask a job to stop: cleanly, or at once.

    Raises:
        UserError: there is no such job.
    """
    name, there = _at(name, on)
    there.stop([name], now)


def delete(name: str | records.Job, on: str | None = None) -> None:
    """Remove a job that has ended, with all that was written for it.

    Raises:
        UserError: there is no such job, or it has not ended.
    """
    name, there = _with(name, on)
    there.delete([name])


# -- helpers -----------------------------------------------------------------------------------------------------------


def _at(job: str | records.Job, on: str | None) -> tuple[str, Backend]:
    """The name of a job, and where it is to be."""
    name = job.name if isinstance(job, records.Job) else job
    if not isinstance(name, str):
        raise UserError(f"{name!r} is no job; give its name, or what `submit` or `get` returned")
    if on is None:
        return name, job._there if isinstance(job, Job) else everywhere.backend_with(name)
    return name, _load(on)


def _with(job: str | records.Job, on: str | None) -> tuple[str, Backend]:
    """The same of a job that must be there."""
    found = get(job, on)
    return found.name, found._there


def _load(on: Any) -> Backend:
    if on is not None and not isinstance(on, str):
        raise UserError(f"on: {on!r} is no target; give its name")
    return load(on)


def _names(hosts: Any) -> list[str]:
    """Hosts, given one by one or with commas between them."""
    found = hosts.split(",") if isinstance(hosts, str) else list(hosts) if isinstance(hosts, (list, tuple)) else [hosts]
    if not all(isinstance(host, str) for host in found):
        raise UserError(f"hosts: {hosts!r} are no names of hosts; write for example ['node1', 'node2']")
    return found


def _patience(seconds: Any) -> float | None:
    """How long to wait, as it was given: seconds, or a duration such as "10m"."""
    if isinstance(seconds, (int, float)):
        return float(seconds)
    try:
        return duration(seconds, usual="s")
    except ValueError as error:
        raise UserError(f"seconds: {error}") from None


def _checked(query: LogQuery) -> LogQuery:
    """A query that can be answered, with the time since when in seconds since the epoch."""
    if not isinstance(query, LogQuery):
        raise UserError(f"{query!r} is no LogQuery; write for example LogQuery(ranks=(0, 1), tail=10)")
    ranks, since = (query.ranks,) if isinstance(query.ranks, int) else query.ranks, query.since
    for field in ("tail", "attempt"):
        number = getattr(query, field)
        if number is not None and not (isinstance(number, int) and number >= 0):
            raise UserError(f"{field}: {number!r} is no whole number from 0 on")
    if ranks is not None and not (isinstance(ranks, (list, tuple, range)) and all(isinstance(it, int) for it in ranks)):
        raise UserError(f"ranks: {ranks!r} are no numbers of ranks; write for example (0, 1), or None for all")
    try:
        since = since if since is None or isinstance(since, (int, float)) else moment(since)
    except ValueError as error:
        raise UserError(f"since: {error}") from None
    return replace(query, ranks=None if ranks is None else tuple(ranks), since=since)


def _known(name: str, there: Backend) -> Job:
    return Job._of(_found(name, there), there)


def _found(name: str, there: Backend) -> records.Job:
    found = there.describe([name]).jobs
    if not found:
        raise UserError(f"no job {name!r}")
    return found[0]


def _warn(line: str) -> None:
    warnings.warn(line, stacklevel=3)


def _warn_of_secrets(spec: JobSpec) -> None:
    for line in notes_on_secrets(spec.env, spec.setup, spec.has_unused_credentials):
        warnings.warn(line, stacklevel=4)


class NoProgress:
    """Progress that is not shown."""

    def __call__(self, what: str, done: int, total: int | None, now: str = "") -> None:
        pass

    def say(self, line: str) -> None:
        pass
