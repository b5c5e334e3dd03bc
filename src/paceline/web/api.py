"""What the page asks for, at `/api/…`: JSON with the keys of `-o json`. `/api/openapi.json` describes it.

The names of jobs and targets are looked up among those that are known; none reaches the file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import os
import re
import shlex
import socket
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from paceline._version import __version__
from paceline.backends import registry
from paceline.backends.base import Elastic, Forwards, Listed, Metered, Prepared, Sketched, Suspends, TensorBoards, able
from paceline.backends.story import story
from paceline.job.errors import UserError
from paceline.job.flags import flag_of
from paceline.job.job import STATES, Job, hangs
from paceline.job.quantities import show_time
from paceline.job.secret_values import notes_on_secrets
from paceline.job.shown import reason, share
from paceline.jobs import Job as Known
from paceline.jobs import NoProgress, prepare_again

from .gather import gathered, job_file
from .lines import COMMAND
from .machines import MOST, Machines
from .report import report
from .safety import SESSION

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from starlette.requests import Request

    from paceline.backends.base import Backend
    from paceline.backends.watch import Found, Lender, Watch
    from paceline.job.job import Node

    from .lines import Asked
    from .safety import Sessions

_MOST_ROWS = 500  # in one answer
_MOST_SKETCHES = 100  # of losses, in one answer
_KEPT_SKETCHES = 2000
_SKETCHED = 20.0  # seconds after which the losses of a job that runs are read again
_LEARNT = 600.0  # seconds after which it is asked again how many devices a target has
_MOST_LABELS = 20  # that the page can group by
_MOST_STREAMS = 64  # of changes
_MOST_READERS = 16  # processes that read logs
_AT_ONCE = 4  # requests to one target
_PULSE = 15.0  # seconds after which a stream without news shows that it lives
_LEAST = 0.5  # seconds between two news
_REPORT_LINES = 200  # of each rank
_MOST_NAMED = 100  # changed jobs that a piece of news names
_RANKS = re.compile(r"all|[0-9]{1,9}(,[0-9]{1,9})*")
_SWITCHES = {"dry_run", "fresh", "now", "remove"}  # of what is sent
_TEXTS = {"created", "file", "on"}
_CHANGEABLE = ("args", "devices", "env", "max_restarts", "nodes", "ranks", "time_limit")  # of a job that runs again


Answer = dict[str, object]  # the keys of the JSON
Sent = dict[str, Any]  # the keys of the JSON that an operation was sent


class Refused(Exception):
    """A request that cannot be answered: the status, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True)
class _Operation:
    """One path of the API."""

    method: str
    path: str
    answers: str  # it; the name of a method of `Api`
    summary: str
    query: Mapping[str, str] = field(default_factory=dict)  # parameters behind `?`, and what they mean
    body: Mapping[str, str] = field(default_factory=dict)  # the keys of the JSON that is sent, and what they mean


_JOB = "/api/jobs/{target}/{name}"
OPERATIONS = (
    _Operation("POST", SESSION, "session", "Exchange the token for a cookie and a key.",
               body={"token": "of the address that paceline web has printed"}),
    _Operation("GET", "/api/about", "about", "The server: version, user, host, and whether it is read-only."),
    _Operation("GET", "/api/changes", "changes", "A stream of server-sent events: which jobs have changed."),
    _Operation("GET", "/api/jobs", "jobs", "Jobs of all targets, the targets, and how many jobs have which state.",
               {"q": "text in the name, target, labels, command, or reason", "state": "of these states, with commas",
                "target": "of this target", "sort": "key to sort by, with - in front for descending order",
                "offset": "number of rows to leave out", "limit": f"number of rows, at most {_MOST_ROWS}",
                "fields": "keys of each job, with commas; all by default",
                "group": "instead of jobs, groups of them: by name, command, or label:NAME",
                "in": "of this group: name:GROUP, command:GROUP, or label:NAME=VALUE"}),
    _Operation("GET", "/api/losses", "losses", "The losses that jobs have logged, some 40 of each over all its steps.",
               {"target": "of the jobs", "names": f"of at most {_MOST_SKETCHES} jobs, with commas"}),
    _Operation("GET", _JOB, "job", "All about a job."),
    _Operation("GET", f"{_JOB}/view", "view", "What its report shows: curves, metrics, events, why it failed."),
    _Operation("GET", f"{_JOB}/report", "report", "Its report: one file of HTML, as `paceline report` writes it."),
    _Operation("GET", f"{_JOB}/events", "events", "What happened to a job, in order."),
    _Operation("GET", f"{_JOB}/file", "file", "The job as a job file (YAML)."),
    _Operation("GET", f"{_JOB}/contents", "contents", "What is deleted with a job: checkpoints, and bytes."),
    _Operation("GET", f"{_JOB}/logs", "logs", "Log lines, a JSON value a line: [time, attempt, rank, stream, text], "
               "in a search also [begin, end] of the first match in each line; "
               'then {"end": why, or null}.',
               {"ranks": "numbers with commas, or all; rank 0 by default", "attempt": "of this attempt; the last one "
                "by default", "tail": "only so many of the last lines", "since": "only lines since this time, in "
                "seconds since the epoch", "grep": "only lines that match this regular expression", "skip": "leave out "
                "so many lines", "limit": "at most so many lines", "follow": "1: go on until the job ends"}),
    _Operation("POST", f"{_JOB}/stop", "stop", "Stop a job.", body={"now": "true: at once; nothing is saved"}),
    _Operation("POST", f"{_JOB}/suspend", "suspend", "Have a job save and give its devices back, until it is resumed."),
    _Operation("POST", f"{_JOB}/resume", "resume", "Let a suspended job go on."),
    _Operation("POST", f"{_JOB}/delete", "delete", "Delete a job that has ended, with its files.",
               body={"created": "when it was submitted: another job of this name is not deleted"}),
    _Operation("POST", f"{_JOB}/scale", "scale", "Add nodes to a running job, or remove some.",
               body={"nodes": "how many to add; to remove if negative", "hosts": "which, instead of a number",
                     "remove": "true: remove these hosts"}),
    _Operation("POST", f"{_JOB}/resubmit", "resubmit", "Run a job again, from its newest checkpoint.",
               body={**{name: "changes this field of the job" for name in _CHANGEABLE},
                     "args": "its arguments: a list, or text as a shell reads it",
                     "env": "variables: names and values, or text with NAME=VALUE in each line", "fresh": "true: begin "
                     "anew", "on": "another target", "dry_run": "true: only say what would be started"}),
    _Operation("POST", f"{_JOB}/tensorboard", "tensorboard", "The address of its TensorBoard, which is started."),
    _Operation("POST", "/api/submit", "submit", "Submit a job from the folder of the server.",
               body={"file": "a job file (YAML)", "on": "the target, if the file names none",
                     "dry_run": "true: only say what would be started"}),
    _Operation("GET", "/api/machines", "machines", "The machines of a target, and what is in use.",
               {"target": "its name; this machine by default",
                "shown": f"names of machines, with commas, or 1 for the first {MOST}; others lack details",
                "curves": "1: also how much CPU, memory and GPUs of those that are shown were in use in each minute of "
                "the last hour, as far as the page or jobs have seen it"}),
    _Operation("GET", "/api/openapi.json", "openapi", "This description."),
)  # fmt: skip


def openapi() -> Answer:
    """The description of the API, in OpenAPI 3.1."""
    paths: dict[str, dict[str, object]] = {}
    for it in OPERATIONS:
        parts = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                 for name in ("target", "name") if f"{{{name}}}" in it.path]  # fmt: skip
        parts += [{"name": name, "in": "query", "description": what, "schema": {"type": "string"}}
                  for name, what in it.query.items()]  # fmt: skip
        shown: Answer = {
            "operationId": it.answers,
            "summary": it.summary,
            "parameters": parts,
            "responses": {"200": {"description": "the answer"}, "4XX": {"description": '{"error": why}'}},
        }
        if it.method == "POST":
            keys = {name: {"description": what} for name, what in it.body.items()}
            schema = {"type": "object", "properties": keys, "additionalProperties": False}
            shown["requestBody"] = {"content": {"application/json": {"schema": schema}}}
        paths.setdefault(it.path, {})[it.method.lower()] = shown
    schemes = {"token": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "paceline web", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": schemes},
        "security": [{"token": []}],
    }


# -- jobs in a table ---------------------------------------------------------------------------------------------------


def loss(job: Job) -> float | None:
    """The loss that a job has reported last, if one of its metrics is called so."""
    metrics = (job.progress or {}).get("metrics") or {}
    return next((value for name, value in metrics.items() if "loss" in name.lower()), None)


_SORTS: dict[str, Callable[[Job], Any]] = {
    "name": lambda job: job.name,
    "state": lambda job: STATES.index(job.state),
    "backend": lambda job: job.backend,
    "kind": lambda job: job.kind or job.framework,
    "nodes": lambda job: job.nodes,
    "ranks": lambda job: job.ranks,
    "created": lambda job: job.created,
    "duration": lambda job: job.duration(time.time()),
    "progress": share,
    "left": lambda job: (job.progress or {}).get("seconds_left"),
    "loss": loss,
    "speed": lambda job: (job.progress or {}).get("samples_per_second"),
    "devices": lambda job: len(job.devices) or job.allocated,
    "restarts": lambda job: job.restarts,
    "user": lambda job: job.user,
}


def _chosen(found: list[Found], query: Mapping[str, str]) -> tuple[list[Found], Counter[str]]:
    """The jobs that a query asks for, in its order; and how many have which state, of whatever state they are."""
    if target := query.get("target"):
        found = [it for it in found if it.job.backend == target]
    if group := query.get("in"):
        kind, _, key = group.partition(":")
        of = _group_of(f"label:{key.partition('=')[0]}" if kind == "label" else kind)
        found = [it for it in found if of(it.job) == key]
    if words := query.get("q", "").lower().split():
        found = [it for it in found if all(word in _text(it.job) for word in words)]
    counts = Counter(it.job.state for it in found)
    if states := query.get("state"):
        found = [it for it in found if it.job.state in states.split(",")]
    return _sorted(found, query.get("sort", "-created")), counts


def _sorted(found: list[Found], name: str) -> list[Found]:
    if name == "-created":
        return found
    key = _SORTS.get(name.lstrip("-"))
    if key is None:
        raise Refused(400, f"sort={name}: no such key; take one of {', '.join(_SORTS)}")
    known = [(value, it) for it in found if (value := key(it.job)) is not None]
    known.sort(key=lambda pair: pair[0], reverse=name.startswith("-"))
    return [it for _, it in known] + [it for it in found if key(it.job) is None]


_HAS: dict[str, Callable[[Job], Any]] = {
    "done": lambda job: job.progress and job.state != "SUCCEEDED",
    "left": lambda job: job.state == "RUNNING" and _SORTS["left"](job) is not None,
    "loss": lambda job: loss(job) is not None,
    "speed": lambda job: job.state == "RUNNING" and _SORTS["speed"](job) is not None,
    "devices": _SORTS["devices"],
    "restarts": _SORTS["restarts"],
    "nodes": lambda job: job.nodes > 1,
    "why": reason,
}
# What jobs of one script, and trials of a search, end with. Five letters without a digit may be a word.
_NUMBERED = re.compile(r"-(?:(?=[a-z]*[0-9])[a-z0-9]{5}|[0-9]+)$")
_LETTERS = re.compile(r"-[a-z]{5}$")
_NEED = re.compile(r"waits for (?:[0-9]+ devices?|devices? .*)")
_DAY = 24 * 3600.0  # seconds


def _has(found: list[Found]) -> list[str]:
    """The columns in which one of these jobs has something; their kind and user, if there are several."""
    kinds = ["kind"] if len({it.job.kind or it.job.framework for it in found}) > 2 else []
    users = ["user"] if len({it.job.user for it in found if it.job.user}) > 1 else []
    return [*kinds, *users, *(name for name, of in _HAS.items() if any(of(it.job) for it in found))]


def _summary(found: list[Found], machines: Machines, now: float) -> Answer:
    """What stands above all jobs: how many run, on how many devices, what others wait for, and what failed lately."""
    jobs = [it.job for it in found]
    running = [job for job in jobs if job.state == "RUNNING"]
    waits = [job for job in jobs if job.state in ("PENDING", "STARTING", "RESTARTING", "SUSPENDED")]
    failed = [job for job in jobs if job.state in ("FAILED", "LOST") and (job.finished or job.created) > now - _DAY]
    there_are, kind = machines.devices(running) or (None, None)
    return {
        "running": len(running),
        "hung": sum(map(hangs, running)),
        "devices": sum(len(job.devices) or job.allocated or 0 for job in running),
        "devices_all": there_are,  # where they run; None if that is not known
        "devices_kind": kind,
        "waiting": len(waits),
        "reasons": Counter(why for job in waits if (why := _awaited(job))).most_common(3),
        "failed": len(failed),
        "causes": Counter(job.cause for job in failed if job.cause).most_common(3),
    }


def _awaited(job: Job) -> str | None:
    """What a job waits for, without what differs from job to job: the names and numbers of others."""
    if job.state == "SUSPENDED":
        return "suspended"
    first = (job.waiting or "").partition("; ")[0]
    return "waits for devices" if _NEED.fullmatch(first) else first or None


def _stem(job: Job) -> str:
    """The name without what makes it unlike others. An ending of letters is random only behind the script's name."""
    name, script = _LETTERS.sub("", job.name), job.command.removeprefix("-m ").partition(" ")[0]
    return name if name in re.split("[/.]", script) else _NUMBERED.sub("", job.name)


def _group_of(by: str) -> Callable[[Job], str | None]:
    """What jobs of one group have in common; None for a job that is in none."""
    kind, _, label = by.partition(":")
    if kind == "label" and label:
        return lambda job: f"{label}={job.labels[label]}" if label in job.labels else None
    if by == "command":
        return lambda job: job.command
    if by == "name":
        return _stem
    raise Refused(400, f"group={by}: take name, command or label:NAME")


def _groups(found: list[Found], by: str) -> list[Answer]:
    """Groups of jobs, the one with the newest job first."""
    of, members = _group_of(by), dict[str, list[Job]]()
    for job in (it.job for it in found):
        if (key := of(job)) is not None:
            members.setdefault(key, []).append(job)
    return [
        {
            "group": key,
            "jobs": len(jobs),
            "states": Counter(job.state for job in jobs),
            "loss": min((value for value in map(loss, jobs) if value is not None), default=None),
            "created": show_time(max(job.created for job in jobs)),
        }
        for key, jobs in sorted(members.items(), key=lambda pair: -max(job.created for job in pair[1]))
    ]


def _text(job: Job) -> str:
    labels = " ".join(f"{name}={value}" for name, value in job.labels.items())
    return f"{job.name} {job.backend} {job.kind} {labels} {job.user or ''} {job.command} {reason(job) or ''}".lower()


def _row(job: Job, fields: frozenset[str]) -> Answer:
    shown = job.to_dict()
    if not fields:
        return {**shown, "traceback": None}
    more = {"hangs": hangs(job)} if "hangs" in fields else {}
    return {name: shown[name] for name in shown if name in fields} | more


# -- the answers -------------------------------------------------------------------------------------------------------


class Api:
    """Answers the operations."""

    def __init__(self, watch: Watch, sessions: Sessions, *, read_only: bool, secure: bool) -> None:
        self._watch, self._sessions, self._read_only, self._secure = watch, sessions, read_only, secure
        self._streams = 0
        self._readers = 0
        self._limits: dict[str, anyio.CapacityLimiter] = {}
        self._forwards: dict[tuple[str, str], str] = {}
        self._machines = Machines()
        self._tasks: set[asyncio.Task[None]] = set()
        # target and name of a job → its time and state, when its losses were read, and these
        self._sketches: dict[tuple[str, str], tuple[tuple[float, str], float, list[float]]] = {}

    def routes(self) -> list[Route]:
        """The routes of all operations."""
        return [Route(it.path, self._endpoint(getattr(self, it.answers)), methods=[it.method]) for it in OPERATIONS]

    def _endpoint(self, answer: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                found = await answer(request)
            except Refused as error:
                return _json({"error": str(error)}, error.status)
            except UserError as error:
                return _json({"error": str(error)}, 400)
            return found if isinstance(found, Response) else _json(found)

        return endpoint

    async def _on(self, target: str, call: Callable[[], Any]) -> Any:
        """What a call to a target returns; others do not wait for it."""
        limit = self._limits.setdefault(target, anyio.CapacityLimiter(_AT_ONCE))
        return await anyio.to_thread.run_sync(call, limiter=limit, abandon_on_cancel=True)

    async def _with(self, found: Found, call: Callable[[Backend], Any]) -> Any:
        """What a call to the backend of a job returns."""

        def called() -> Any:
            with found.lender.lent() as there:
                return call(there)

        return await self._on(found.job.backend, called)

    async def _find(self, request: Request) -> Found:
        target, name = request.path_params["target"], request.path_params["name"]
        try:
            return await run_in_threadpool(self._watch.find, target, name)
        except KeyError:
            error = next((it["error"] for it in self._watch.targets() if it["name"] == target), None)
            why = f" is known, but it may be there: {error}" if error else ""
            raise Refused(404, f"no job {name!r} on {target}{why}") from None

    async def _now(self, found: Found) -> Job:
        """What is known of a job now."""
        listing = await self._with(found, lambda there: there.describe([found.job.name]))
        for job in listing.jobs:
            if isinstance(job, Job):
                return job
        raise Refused(404, f"job {found.job.name} is gone")

    # -- the server

    async def session(self, request: Request) -> Response:
        token = (await _sent(request, "session")).get("token")
        if not isinstance(token, str) or not self._sessions.is_token(token):
            raise Refused(401, "this address is not that of the running server; open the one that paceline web printed")
        cookie, key = self._sessions.new()
        answer = _json({"key": key})
        answer.set_cookie(self._sessions.cookie, cookie, httponly=True, samesite="strict", secure=self._secure)
        return answer

    async def about(self, request: Request) -> Answer:
        with contextlib.suppress(KeyError, OSError):
            return {"version": __version__, "read_only": self._read_only, "user": getpass.getuser(),
                    "host": socket.gethostname(), "folder": os.getcwd()}  # fmt: skip
        return {"version": __version__, "read_only": self._read_only, "user": "", "host": "", "folder": ""}

    async def openapi(self, request: Request) -> Answer:
        return openapi()

    async def changes(self, request: Request) -> Response:
        if self._streams >= _MOST_STREAMS:
            raise Refused(503, "too many pages are open; close some")
        return StreamingResponse(self._news(), media_type="text/event-stream")

    async def _news(self) -> AsyncIterator[str]:
        loop, has_news = asyncio.get_running_loop(), asyncio.Event()
        self._streams += 1
        try:
            with self._watch.listening(lambda: loop.call_soon_threadsafe(has_news.set)):
                shown = 0
                while True:
                    version = self._watch.version
                    changed = [] if not shown else [
                        [it.job.backend, it.job.name] for it in self._watch.jobs() if it.version > shown
                    ]  # fmt: skip
                    news = {"version": version, "changed": changed if len(changed) <= _MOST_NAMED else None}
                    shown = version
                    yield f"data: {json.dumps(news)}\n\n"
                    await asyncio.sleep(_LEAST)
                    while True:
                        with contextlib.suppress(asyncio.TimeoutError):
                            await asyncio.wait_for(has_news.wait(), _PULSE)
                            break
                        yield ": still here\n\n"
                    has_news.clear()
        finally:
            self._streams -= 1

    # -- jobs

    async def jobs(self, request: Request) -> Answer:
        query = dict(request.query_params)
        offset, limit = _number(query, "offset", 0), min(_number(query, "limit", 100), _MOST_ROWS)
        fields = frozenset(filter(None, query.get("fields", "").split(",")))

        busy: dict[str, Lender] = {}

        def answer() -> Answer:
            version = self._watch.version  # before the jobs: an answer never claims news that it does not hold
            everything = self._watch.jobs()
            busy.update((it.job.backend, it.lender) for it in everything if it.job.state == "RUNNING")
            found, counts = _chosen(everything, query)
            rows: Answer = {"jobs": [_row(it.job, fields) for it in found[offset : offset + limit]]}
            if by := query.get("group"):
                groups = _groups(found, by)
                rows = {"jobs": [], "groups": groups[offset : offset + limit], "groups_total": len(groups)}
            return {
                "version": version,
                "time": show_time(time.time()),
                "total": len(found),
                **rows,
                "has": _has(found),
                "summary": _summary(everything, self._machines, time.time()),
                "labels": sorted({name for it in everything for name in it.job.labels})[:_MOST_LABELS],
                "counts": counts,
                "targets": self._watch.targets(),
                "problem": self._watch.problem,
            }

        answered = await run_in_threadpool(answer)
        self._learn(busy)
        return answered

    def _learn(self, busy: Mapping[str, Lender]) -> None:
        """Ask targets now and then how many devices they have; nobody waits for it."""
        for target, lender in busy.items():
            if self._machines.is_due(target, time.time(), _LEARNT):
                task = asyncio.create_task(self._learnt(target, lender))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _learnt(self, target: str, lender: Lender) -> None:
        with contextlib.suppress(UserError):
            await self._on(target, lambda: self._seen(target, lender, "1", has_curves=False))
            self._watch.announce()

    async def losses(self, request: Request) -> Answer:
        target = request.query_params.get("target", registry.HERE)
        found: dict[str, Found] = {}
        for name in request.query_params.get("names", "").split(",")[:_MOST_SKETCHES]:
            with contextlib.suppress(KeyError):
                found[name] = await run_in_threadpool(self._watch.find, target, name)
        stamps = {name: (it.job.created, it.job.state) for name, it in found.items()}
        now = time.monotonic()

        def is_known(name: str) -> bool:
            stamp, when, _ = self._sketches.get((target, name), (None, 0.0, None))
            return stamp == stamps[name] and (found[name].job.is_over or now - when < _SKETCHED)

        wanted = [name for name in found if not is_known(name)]
        if wanted:
            read = await self._with(found[wanted[0]], lambda there: _losses(there, wanted))
            for name in wanted:
                self._sketches.pop((target, name), None)  # so that the ones that were read first come first
                self._sketches[target, name] = stamps[name], now, read.get(name, [])
            for key in list(self._sketches)[: max(0, len(self._sketches) - _KEPT_SKETCHES)]:
                del self._sketches[key]
        return {"losses": {name: it for name in found if (it := self._sketches[target, name][2])}}

    async def job(self, request: Request) -> Answer:
        found = await self._find(request)
        job = await self._now(found)
        can = await self._with(found, lambda there: self._can(job, there))
        return {"job": job.to_dict(), "commands": _commands(job, found.there), "can": can, "hangs": hangs(job)}

    def _can(self, job: Job, there: Backend) -> list[str]:
        """The actions that make sense for a job now."""
        if self._read_only:
            return []
        has = {
            "stop": not job.is_over and (job.state != "LOST" or there.can_stop(job.name)),
            "suspend": not job.is_over and job.state not in ("LOST", "SUSPENDED") and isinstance(there, Suspends),
            "resume": job.state == "SUSPENDED" and isinstance(there, Suspends),
            "scale": job.state == "RUNNING" and isinstance(there, Elastic),
            "resubmit": job.is_over or job.state == "LOST",
            "delete": job.is_over,
            "tensorboard": isinstance(there, TensorBoards),
        }
        return [name for name, it in has.items() if it]

    async def view(self, request: Request) -> Any:
        found = await self._find(request)
        job = await self._now(found)
        return await self._with(found, lambda there: gathered(job, there, 0))

    async def report(self, request: Request) -> Response:
        found = await self._find(request)
        job = await self._now(found)
        text = await self._with(found, lambda there: report([gathered(job, there, _REPORT_LINES)]))
        kept = {"Content-Disposition": "attachment; filename=report.html"}  # the page names it as the job
        return Response(text, media_type="text/html", headers=kept)

    async def events(self, request: Request) -> Answer:
        found = await self._find(request)
        happened = await self._with(found, lambda there: story(found.job, there.events(found.job.name)))
        return {"events": [{**it, "time": show_time(it["time"])} for it in happened]}

    async def file(self, request: Request) -> Response:
        found = await self._find(request)
        spec = await self._with(found, lambda there: there.spec(found.job.name))
        return Response(job_file(spec, for_others=False), media_type="text/plain")

    async def contents(self, request: Request) -> Answer:
        found = await self._find(request)
        name = found.job.name
        contents = (await self._with(found, lambda there: there.contents([name]))).get(name)
        return {"checkpoints": None, "size": None} if contents is None else asdict(contents)

    async def logs(self, request: Request) -> Response:
        found, query = await self._find(request), dict(request.query_params)
        if self._readers >= _MOST_READERS:
            raise Refused(503, "too many logs are open; close some")
        ranks = query.get("ranks", "0")
        if not _RANKS.fullmatch(ranks):
            raise Refused(400, f"ranks={ranks[:40]}: give numbers with commas, or all")
        chosen = None if ranks == "all" else tuple(map(int, ranks.split(",")))
        try:
            since = float(query["since"]) if "since" in query else None
        except ValueError:
            raise Refused(400, f"since={query['since'][:40]}: give seconds since the epoch") from None
        known = {it["name"] for it in self._watch.targets()} | registry.kinds_of_hosts()
        request_of_lines: Asked = {
            "name": found.job.name,
            "on": found.there.name if found.there.name in known else None,
            "query": {
                "ranks": chosen,
                "since": since,
                "tail": _number(query, "tail", None),
                "attempt": _number(query, "attempt", None),
                "follow": query.get("follow") == "1",
            },
            "grep": query.get("grep"),
            "skip": _number(query, "skip", 0),
            "limit": _number(query, "limit", None),
        }
        return StreamingResponse(self._lines(request_of_lines), media_type="application/x-ndjson")

    async def _lines(self, request: Asked) -> AsyncIterator[bytes]:
        """What a process of its own reads; it ends when the page asks no more."""
        self._readers += 1
        pipe = asyncio.subprocess.PIPE
        try:
            reader = await asyncio.create_subprocess_exec(*COMMAND, stdin=pipe, stdout=pipe, limit=1 << 18)
            assert reader.stdin is not None and reader.stdout is not None
            is_read = False
            try:
                reader.stdin.write(json.dumps(request).encode() + b"\n")
                while data := await reader.stdout.read(1 << 18):
                    yield data
                is_read = True
            finally:
                reader.stdin.close()
                if not is_read:  # of one that has ended, kill() takes the exit status, which asyncio then misses
                    with contextlib.suppress(ProcessLookupError):
                        reader.kill()
                await reader.wait()
        finally:
            self._readers -= 1

    # -- actions

    async def stop(self, request: Request) -> Answer:
        found, sent = await self._find(request), await _sent(request, "stop")
        name = found.job.name
        unreached = await self._with(found, lambda there: there.stop([name], sent.get("now", False)))
        self._watch.look_now()
        return {"unreached": unreached.get(name)}

    async def suspend(self, request: Request) -> Answer:
        return await self._suspend(request, "suspend", lambda there, name: there.suspend([name]))

    async def resume(self, request: Request) -> Answer:
        return await self._suspend(request, "resume", lambda there, name: there.resume([name]))

    async def _suspend(self, request: Request, verb: str, do: Callable[[Suspends, str], Mapping[str, str]]) -> Answer:
        found, _ = await self._find(request), await _sent(request, verb)
        name = found.job.name
        unreached = await self._with(found, lambda there: do(able(there, Suspends), name))
        self._watch.look_now()
        return {"unreached": unreached.get(name)}

    async def delete(self, request: Request) -> Answer:
        found, sent = await self._find(request), await _sent(request, "delete")
        job = await self._now(found)
        if show_time(job.created) != sent.get("created"):
            raise Refused(409, f"job {job.name} has changed since it was looked at, and stays")
        remainders = await self._with(found, lambda there: there.delete([job.name]))
        self._watch.look_now()
        return {"remainders": remainders}

    async def scale(self, request: Request) -> Answer:
        found, sent = await self._find(request), await _sent(request, "scale")
        nodes: Any = sent.get("nodes") or 0
        hosts: Any = sent.get("hosts") or []
        if type(nodes) is not int or not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
            raise Refused(400, "nodes is a number, and hosts a list of names")
        if bool(nodes) is bool(hosts):
            raise Refused(400, "give either a number of nodes, or hosts")
        name = found.job.name
        fewer = sent.get("remove", False) if hosts else nodes < 0

        def scaled(there: Backend) -> list[str]:
            which: Any = hosts or int.__abs__(nodes)
            elastic = able(there, Elastic)
            return elastic.scalein(name, which) if fewer else elastic.scaleout(name, which)

        changed = await self._with(found, scaled)
        self._watch.look_now()
        return {"removed" if fewer else "added": changed}

    async def resubmit(self, request: Request) -> Answer:
        found, sent = await self._find(request), await _sent(request, "resubmit")
        changes = {name: _read(name, sent[name]) for name in _CHANGEABLE if sent.get(name) is not None}
        fresh, on = sent.get("fresh", False), sent.get("on") or None
        flags = [word for name, value in changes.items() if name != "args" for word in _flags(name, value)]
        where = f" --on {shlex.quote(on)}" if on else found.there.where
        words = [*flags, *(["--fresh"] if fresh else []), found.job.name]
        words += ["--", *map(str, changes["args"])] if isinstance(changes.get("args"), list) else []
        command = f"paceline resubmit{where} {shlex.join(words)}"

        def prepared() -> tuple[Backend, Prepared]:
            job = Known._of(found.job, found.lender.new())
            return prepare_again(job, on=on, fresh=fresh, **changes)

        there, ready = await self._on(found.job.backend, prepared)
        return await self._start(there, ready, command, dry_run=sent.get("dry_run", False))

    async def submit(self, request: Request) -> Answer:
        from paceline.job.reading import read

        sent = await _sent(request, "submit")
        text, on = sent.get("file") or "", sent.get("on") or None

        def prepared() -> tuple[Backend, Prepared]:
            spec = read("job file", {"backend": on} if on else {}, flag_of, text)
            there = registry.load(spec.backend if "backend" in spec.given else None)
            return there, there.prepare(spec)

        there, ready = await self._on(str(on), prepared)
        command = f"paceline submit{there.where} job.yaml"
        return await self._start(there, ready, command, dry_run=sent.get("dry_run", False))

    async def _start(self, there: Backend, ready: Prepared, command: str, *, dry_run: bool) -> Answer:
        """Start a prepared job, or say what would be started."""
        spec = ready.spec
        notes = [*ready.notes, *notes_on_secrets(spec.env, spec.setup, spec.has_unused_credentials)]
        if dry_run:
            return {"text": ready.text(), "notes": notes, "command": command, "target": there.name}
        job: Job = await self._on(there.name, lambda: there.start(ready, NoProgress()))
        self._watch.add(job, there)
        return {"name": job.name, "target": job.backend, "notes": notes, "command": command}

    async def tensorboard(self, request: Request) -> Answer:
        found = await self._find(request)
        key = found.job.backend, found.job.name
        notes: list[str] = []

        def opened() -> str:
            there = able(found.lender.new(), TensorBoards)  # a forward may use it until the server ends
            url = there.open_tensorboard(found.job.name, None, notes.append)
            if isinstance(there, Forwards):
                return self._forwarded(there, key, url, notes)
            if how := there.reach_tensorboard(found.job.name, url):
                notes.append(how)
            return url

        return {"url": await self._on(found.job.backend, opened), "notes": notes}

    def _forwarded(self, there: Forwards, key: tuple[str, str], url: str, notes: list[str]) -> str:
        """The address here that leads to a TensorBoard, until the server ends."""
        if key not in self._forwards:
            forward = contextlib.ExitStack().enter_context(there.forward_tensorboard(key[1], url, notes.append))

            def serve() -> None:
                try:
                    forward.serve()
                finally:
                    self._forwards.pop(key, None)

            self._forwards[key] = forward.url
            threading.Thread(target=serve, daemon=True).start()
        return self._forwards[key]

    # -- machines

    async def machines(self, request: Request) -> Answer:
        target = request.query_params.get("target", registry.HERE)
        try:
            lender = self._watch.lender(target)
        except KeyError:
            raise Refused(404, f"no target {target!r}") from None
        query = request.query_params
        shown = query.get("shown", "")
        return await self._on(target, lambda: self._seen(target, lender, shown, query.get("curves") == "1"))  # type: ignore[no-any-return]

    def _seen(self, target: str, lender: Lender, shown: str, has_curves: bool) -> Answer:
        """The machines of a target; those that are remembered if it does not answer."""
        warnings: list[str] = []
        named: list[Node] = []
        jobs = [it.job for it in self._watch.jobs() if it.lender is lender]
        try:
            with lender.lent() as there:
                named = there.silent_nodes() if isinstance(there, Listed) else []
                there_are = able(there, Metered).nodes(warnings.append)
                rows = self._machines.take(target, there, there_are, jobs, time.time(), fills=has_curves)
        except UserError as error:
            rows = self._machines.lost(target, named)
            if not rows:
                raise
            warnings.append(str(error))
        names = shown.split(",") if shown not in ("", "1") else [row.node.name for row in rows]
        few = set(names[:MOST])
        nodes = [row.to_dict(brief=bool(shown) and row.node.name not in few) for row in rows]
        found: Answer = {"nodes": nodes, "warnings": warnings}
        if has_curves:
            found["curves"] = self._machines.curves(target, names[:MOST], time.time())
        return found


def _losses(there: Backend, names: list[str]) -> Mapping[str, list[float]]:
    """The losses of jobs; none where they are not kept, or nobody answers: the page says that already."""
    with contextlib.suppress(UserError):
        return there.losses(names) if isinstance(there, Sketched) else {}
    return {}


def _commands(job: Job, there: Backend) -> dict[str, str]:
    """Action → the command line that does the same."""
    flags = {"stop_now": " --now", "logs": " -f"}
    actions = (
        "stop", "stop_now", "suspend", "resume", "resubmit", "delete", "scaleout", "scalein", "tensorboard", "logs",
        "get", "why", "report",
    )  # fmt: skip
    name = shlex.quote(job.name)
    return {it: f"paceline {it.partition('_')[0]}{there.where}{flags.get(it, '')} {name}" for it in actions}


def _flags(name: str, value: Any) -> list[str]:
    """The flags of `resubmit` that change a field."""
    if isinstance(value, dict):
        return [word for key, one in value.items() for word in (flag_of((name,)), f"{key}={one}")]
    if name == "devices":
        return ["--devices", ",".join(map(str, value))] if isinstance(value, list) else ["--gpus", str(value)]
    return [flag_of((name,)), str(value)]


def refused(request: Request, error: Exception) -> Response:
    """The answer to a request for something that is not there."""
    assert isinstance(error, HTTPException)
    return _json({"error": error.detail}, error.status_code)


def _json(data: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, media_type="application/json")


async def _sent(request: Request, operation: str) -> Sent:
    """The JSON object that a request for an operation has sent; null is what was not given."""
    try:
        sent = msgspec.json.decode(await request.body() or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        sent = None
    if not isinstance(sent, dict):
        raise Refused(400, "the body is not a JSON object")
    (known,) = (it.body for it in OPERATIONS if it.answers == operation)
    for name, value in sent.items():
        if name not in known:
            raise Refused(400, f"{name[:40]!r}: no such key; {operation} takes {', '.join(known) or 'none'}")
        kind = bool if name in _SWITCHES else str if name in _TEXTS else object
        if value is not None and not isinstance(value, kind):
            raise Refused(400, f"{name}: should be {'true or false' if kind is bool else 'a text'}")
    return {name: value for name, value in sent.items() if value is not None}


def _read(name: str, value: Any) -> Any:
    """What a field of a job is changed to: arguments and variables may be sent as text, as people type them."""
    if name == "args" and isinstance(value, str):
        try:
            return shlex.split(value)
        except ValueError as error:
            raise Refused(400, f"arguments {value!r}: {str(error).lower()}; close it, or write \\ before it") from None
    if name == "env" and isinstance(value, str):
        pairs = [line.partition("=") for line in value.splitlines() if line.strip()]
        wrong = next((key for key, sign, _ in pairs if not sign or not key.strip()), None)
        if wrong is not None:
            raise Refused(400, f"variable {wrong!r}: write NAME=VALUE")
        return {key.strip(): text for key, _, text in pairs}
    return value


def _number(query: Mapping[str, str], name: str, usual: Any) -> Any:
    """A whole number from 0 on."""
    if name not in query:
        return usual
    if not query[name].isascii() or not query[name].isdecimal() or len(query[name]) > 12:
        raise Refused(400, f"{name}={query[name][:40]}: give a whole number from 0 on")
    return int(query[name])
