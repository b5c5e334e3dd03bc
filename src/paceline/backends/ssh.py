"""Machines that ssh reaches as a backend: each keeps its jobs itself, and nothing of ours is installed there.

A verb asks all hosts at once, in one round trip each. What a host says of its jobs comes from its run directories, by
the same code as on this machine; this one only remembers where the jobs went that it has submitted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import math
import os
import re
import secrets
import shutil
import sys
import tarfile
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.job.errors import UserError, nearest
from paceline.job.home import jobs_folder
from paceline.job.job import FINAL, Job, Node, Usage, Volume
from paceline.job.text import printable
from paceline.job.validation import validation_error

from .base import Backend, LogLines, Shell
from .connection import Host, Silent, ask_all
from .joining import code_of, invitation, order
from .parts import Parts
from .preflight import Preflight
from .remote_run import RemoteRun
from .sent import Sent
from .starting import terminal_size
from .streams import Streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import IO

    from paceline.job.spec import JobSpec

    from .base import LogQuery, Progress
    from .connection import Answer, Request
    from .foreground import Shown

_HOST = re.compile(r"(?P<name>[^\s:\[\]-][^\s:\[\]]*|\[[0-9A-Fa-f:.]+\])(:(?P<slots>[0-9]{1,4}))?")
_GOING = ("PENDING", "STARTING", "RESTARTING", "RUNNING")  # of several nodes the least advanced tells the job's state
_SILENCE = 10.0  # seconds in which a host that does not answer is not asked again
_CLOSING = 5.0  # seconds from the end of a job on one host to its end on the others, at most, unless one hangs


class Options(BaseModel):
    """What a target's settings say, beside its backend."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    hosts: list[str] = Field(min_length=1)
    port: int | None = Field(None, ge=1, le=65535)
    identity_file: str | None = None
    python: str = "python3"
    root: str = "~/.local/state/paceline"


def hosts_of(where: Callable[[str], str], given: Mapping[str, Any]) -> list[Host]:
    """The hosts that the settings of a target, or the flags, name.

    Args:
        where: what names an option such as `port` or `hosts.0`, for the reader of an error.
        given: see `Options`.

    Raises:
        UserError: they make no sense.
    """
    try:
        options = Options.model_validate(dict(given))
    except ValidationError as error:
        raise validation_error(error, Options, lambda place: where(".".join(map(str, place)))) from None
    key = options.identity_file
    if key is not None and not os.path.exists(os.path.expanduser(key)):
        raise UserError(f"{where('identity_file')}: no file {key}; name the private key that the hosts accept")
    hosts: dict[str, Host] = {}
    for text in options.hosts:
        found = _HOST.fullmatch(text)
        if found is None:
            raise UserError(
                printable(f"{where('hosts')}: {text!r} is no host; write for example node1, or user@node2:4")
            )
        name = found["name"].strip("[]")
        slots = int(found["slots"] or 0)
        if name in hosts:
            raise UserError(f"{where('hosts')} names {name} twice; leave one out")
        hosts[name] = Host(name, slots, options.port, key, options.python, options.root)
    return list(hosts.values())


class Ssh(Backend):
    """Jobs of this user on machines that ssh reaches.

    Attributes:
        name: of the target.
        where: the flags that lead here.
    """

    def __init__(
        self,
        name: str,
        hosts: list[Host],
        where: str,
        *,
        is_exact: bool = False,
        script: Callable[[], list[str]] | None = None,
    ) -> None:
        """Connect to nothing yet.

        Args:
            name: of the target.
            hosts: its hosts.
            where: the flags that lead here.
            is_exact: a job's nodes are the first of the hosts in this order, and not those that suit best.
            script: gives the hosts that there are now, as the settings have them.
        """
        self.name, self.where, self._script = name, where, script
        first = hosts[0]
        self._options = {
            "port": first.port, "identity_file": first.identity_file, "python": first.python, "root": first.root
        }  # fmt: skip
        self._hosts, self._is_exact = hosts, is_exact
        self._sent = Sent(jobs_folder().parent / "targets" / name)
        self._places: dict[str, list[Host]] = {}  # where jobs were seen, node 0 first
        self._living: dict[str, list[Host]] = {}  # those of them where they had not ended
        self._last: dict[str, list[Host]] = {}  # those of them that are in the last attempt
        self._ranks: dict[tuple[str, int], Host] = {}  # where their ranks were
        self._unheard: dict[str, list[str]] = {}  # why other hosts of theirs said nothing
        self._count: int | None = None
        self._silent: dict[Host, tuple[UserError, float]] = {}  # why, and since when
        self._told: set[Host] = set()

    @classmethod
    def configured(cls, name: str, options: Mapping[str, Any]) -> Ssh:
        """The backend of a target of the settings."""
        return cls(name, hosts_of(lambda key: f"targets.{name}.{key}", options), f" --on {name}")

    @property
    def hosts(self) -> list[Host]:
        """The target's hosts."""
        return list(self._hosts)

    # -- submit --------------------------------------------------------------------------------------------------------

    def plan(self, spec: JobSpec) -> dict[str, Any]:
        """What `submit` would do: the complete job, and the variables of its ranks. Starts nothing."""
        spec = self._asked(spec)
        hosts = self._hosts[: spec.node_range[1]]
        job = {**spec.model_dump(mode="json"), "nodes": 1}

        def ask(start: dict[str, Any] | None) -> list[Answer]:
            starts = {host: start and {**start, "node_rank": number} for number, host in enumerate(hosts)}
            answers = self._ask(
                hosts, lambda host: {"do": "plan", "job": job, "slots": host.slots, "start": starts[host]}
            )
            return list(self._only_answers(answers).values())

        nodes = [answer["node"] for answer in ask(None)]
        main = {"main_address": nodes[0]["address"], "main_port": spec.main_port or 0}
        answers = ask({**main, "nodes": nodes, "attempt": 0, "job": spec.name})
        return {
            "job": {**answers[0]["job"], "nodes": spec.nodes, "ranks": spec.ranks},
            "ranks": [rank for answer in answers for rank in answer["ranks"]],
        }

    def submit(self, spec: JobSpec, progress: Progress) -> Job:
        """Start a job that goes on by itself.

        Raises:
            UserError: it cannot run there, or its name is taken.
        """
        with self._started(self._asked(spec), progress, None) as parts:
            parts.keep()
        job = self._merge([(host, parts.records[host]) for host in parts.hosts], {})
        self._sent.add(job, [host.name for host in parts.hosts])
        return job

    def run(self, spec: JobSpec, progress: Progress, shown: Shown) -> RemoteRun:
        """Start a job that ends with this process, which watches it.

        Raises:
            UserError: see `submit`.
        """
        parts = self._started(self._asked(spec).model_copy(update={"detached": False}), progress, shown)
        least, most = spec.node_range
        return RemoteRun(parts, spec.max_restarts, self.where, shown, self._wanted if least < most else None)

    def _wanted(self) -> list[Host]:
        """The hosts that a job which somebody watches is to have."""
        if self._script is None:
            return self._hosts
        found = hosts_of(lambda _: "--host-discovery-script", {**self._options, "hosts": self._script()})
        known = {host.name: host for host in self._hosts}
        self._hosts += [host for host in found if host.name not in known]
        return [known.get(host.name, host) for host in found]

    def add(self, name: str, hosts: Sequence[str]) -> list[str]:
        """Have hosts take part in a job that runs: these, or those of the target that do not yet, up to its MAX.

        Raises:
            UserError: one cannot; then none does.
        """
        living = self._living_of(name)
        chosen = self._named(hosts) if hosts else [host for host in self._hosts if host not in living]
        if there := [host.name for host in chosen if host in living]:
            raise UserError(f"{there[0]} takes part in job {name} already; leave it out")
        invited = invitation(living, name)
        room = invited["most"] - len(living)
        if hosts and len(chosen) > room:
            raise UserError(f"job {name} takes {room} more of {invited['most']} nodes; name no more")
        chosen = chosen[:room]
        if not chosen:
            return []
        with Parts(name, chosen, lambda host: order(invited, host, None, {}), code_of(invited)) as parts:
            if (taken := parts.start()) is not None:
                raise UserError(f"another job named {name} is on {taken.name}; delete that one first")
            parts.keep()
        return [host.name for host in chosen]

    def leave(self, name: str, hosts: Sequence[str]) -> None:
        """Have hosts leave a job, which goes on without them.

        Raises:
            UserError: one takes no part in it, or too few would be left.
        """
        living, chosen = self._living_of(name), self._named(hosts)
        if others := [host.name for host in chosen if host not in living]:
            raise UserError(f"{others[0]} takes no part in job {name}; leave it out")
        left = len(living) - len(chosen)
        self._only_answers(self._ask(chosen, lambda _: {"do": "leave", "name": name, "left": left}))

    def _living_of(self, name: str) -> list[Host]:
        """The hosts that take part in a job.

        Raises:
            UserError: there is no such job, or it has ended.
        """
        found = self.describe([name])
        if not found or found[0].is_over or not self._living.get(name):
            raise UserError(f"job {name} has ended" if found else f"no job {name} on {self.name}")
        return self._living[name]

    def _named(self, names: Sequence[str]) -> list[Host]:
        """The hosts of these names.

        Raises:
            UserError: one is none of the target's.
        """
        known = {host.name: host for host in self._hosts}
        for name in names:
            if name not in known:
                raise UserError(f"{name} is none of the hosts of {self.name}; {nearest(name, known)}")
        return [known[name] for name in dict.fromkeys(names)]

    def _started(self, spec: JobSpec, progress: Progress, shown: Shown | None) -> Parts:
        """A job whose parts are there; without further words they go again.

        Raises:
            UserError: it cannot run there, or its name is taken.
        """
        missing = [name for name in spec.secrets if name not in os.environ]
        if missing:
            raise UserError(f"secret {missing[0]} is not set in your environment; export it, then submit again")
        data = self._sources(spec)
        looks, chosen = self._preflight(spec, data, progress)
        taken = {name: host for host, look in looks.items() for name in look["names"]}
        with tempfile.TemporaryDirectory() as folder:
            code, archive, record = Path(folder, "code"), Path(folder, "code.tar"), None
            if spec.code is not None and spec.resume_from is None:
                from paceline.job.code import fetch

                record = fetch(spec.code, Path.cwd(), code, progress, progress.say)
                with tarfile.open(archive, "w") as tar:
                    tar.add(code, arcname=".")
            for number in itertools.count(2 if spec.resume_from else 1):
                name = f"{spec.name}{number}" if spec.name.endswith("-") else spec.name
                if name not in taken:
                    order = {
                        "job": spec.model_copy(update={"name": name}),
                        "data": data,
                        "code": record,
                        "bytes": _size(archive),
                        "shown": shown and dataclasses.asdict(shown),
                        "terminal": terminal_size() if shown else {},
                    }
                    progress(f"starting {name}", 0, None)
                    found = self._start(order, chosen, looks[chosen[0]], archive)
                    if isinstance(found, Parts):
                        return found
                    taken[name] = found
                if name == spec.name:
                    raise UserError(
                        f"a job named {name} is on {taken[name].name}; choose another --name, or delete that job"
                    )
        raise AssertionError  # there is always another number

    def _asked(self, spec: JobSpec) -> JobSpec:
        """What the user asked for, as a host understands it.

        Raises:
            UserError: it is nothing for hosts.
        """
        from .submitting import named

        for flag, value in (
            ("--log-dir", spec.log_dir),
            ("--image", spec.image),
            ("--queue", spec.queue),
            ("--master-addr", spec.main_address),
            ("--node-rank", spec.node_rank),
        ):
            if value is not None:
                raise UserError(f"{flag} means nothing on {self.name}, whose hosts are reached by ssh; leave it out")
        least, _ = spec.node_range
        if least > len(self._hosts):
            raise UserError(f"--nnodes {least}, but {self.name} has {len(self._hosts)} hosts; ask for fewer")
        folder = spec.working_dir
        if not folder.startswith("~") and (spec.code is None or folder != "."):
            folder = os.path.normpath(Path.cwd() / folder)
        return named(spec).model_copy(update={"detached": True, "backend": self.name, "working_dir": folder})

    def _sources(self, spec: JobSpec) -> list[dict[str, Any]]:
        """Where the job's volumes are on the hosts, by the settings."""
        if not spec.data:
            return []
        from paceline.job.settings import load

        from .volumes import check

        paths = check(spec.data, load())
        return [
            {"volume": m.volume, "path": paths[m.volume], "wanted": m.path, "variable": m.variable} for m in spec.data
        ]

    def _preflight(
        self, spec: JobSpec, data: list[dict[str, Any]], progress: Progress
    ) -> tuple[dict[Host, Answer], list[Host]]:
        """What the hosts say that answer, and those that the job goes to.

        Raises:
            UserError: too few of them can take it.
        """
        job = spec.model_dump(mode="json")
        with Preflight(self._hosts, lambda host: {"slots": host.slots, "job": job, "data": data}) as preflight:
            self._note(preflight.failed)
            chosen = preflight.choose(*spec.node_range, lambda fit: self._chosen(spec, fit, progress), progress.say)
            return dict(preflight.answers), chosen

    def _chosen(self, spec: JobSpec, looks: Mapping[Host, Answer], progress: Progress) -> list[Host]:
        """The hosts for the job, the best first: those with enough free devices, then as the settings have them.

        Raises:
            UserError: it goes on with another one's checkpoints, and hosts with these cannot take it.
        """
        if spec.resume_from is not None:
            return self._resuming(spec, looks, progress)
        if self._is_exact:
            return list(looks)
        need = spec.devices if isinstance(spec.devices, int) else len(spec.devices or "1")
        return sorted(looks, key=lambda host: looks[host]["free"] < need)

    def _resuming(self, spec: JobSpec, looks: Mapping[Host, Answer], progress: Progress) -> list[Host]:
        """The hosts for a job that goes on with another one's checkpoints: each that took part has copies.

        Others get them from these, but not the code, if the job has code of its own.

        Raises:
            UserError: too few can take it.
        """
        old = self._hosts_of(str(spec.resume_from))
        hosts = [host for host in old if host in looks]
        gone = ", ".join(host.name for host in old if host not in looks)
        if hosts and spec.code is None:
            hosts += [host for host in looks if host not in hosts]
        if len(hosts) < spec.node_range[0]:
            raise UserError(f"{gone} has the checkpoints of {spec.resume_from} and cannot take the job now; try later")
        if gone:
            progress.say(f"{gone} took part in {spec.resume_from} and cannot go on; its checkpoints are not looked at")
        return hosts

    def _start(self, order: dict[str, Any], hosts: list[Host], main: Answer, archive: Path) -> Parts | Host:
        """Start a job's agents, which meet at what the first host told; or return a host that has a job of the name.

        Raises:
            UserError: one cannot be started; nothing is left of the others.
        """
        spec: JobSpec = order["job"]
        common = {
            **order,
            "do": "start",
            "joins": False,
            "job_id": uuid.uuid4().hex,
            "hosts": [host.name for host in hosts],
            "token": secrets.token_hex(16) if spec.node_range[1] > 1 else None,
            "secrets": {name: os.environ[name] for name in spec.secrets},
        }
        meeting = {"main_address": main["address"], "main_port": spec.main_port or main["port"]}

        def request(host: Host) -> Request:
            here = {**meeting, "node_rank": hosts.index(host)} if spec.node_range[1] > 1 else {}
            return {**common, "job": {**spec.model_dump(mode="json"), **here}, "slots": host.slots}

        parts = Parts(spec.name, hosts, request, _sender(archive) if archive.exists() else None)
        try:
            taken = parts.start()
        except BaseException:
            parts.streams.close()
            raise
        if taken is not None:
            parts.streams.close()
        return taken or parts

    # -- look ----------------------------------------------------------------------------------------------------------

    def _ask(self, hosts: Sequence[Host], request: Callable[[Host], Request]) -> dict[Host, Answer | UserError]:
        """Their answers; a host that was silent just now is not asked again."""
        now = time.monotonic()
        silent = {
            host: error for host, (error, when) in self._silent.items() if host in hosts and now - when < _SILENCE
        }
        asked = [host for host in hosts if host not in silent]
        answers: dict[Host, Answer | UserError] = {**silent, **(ask_all(asked, request) if asked else {})}
        self._note({host: answer for host in asked if isinstance(answer := answers[host], UserError)})
        return {host: answers[host] for host in hosts}

    def _note(self, failed: Mapping[Host, UserError]) -> None:
        """Remember who was silent."""
        now = time.monotonic()
        self._silent.update((host, (error, now)) for host, error in failed.items() if isinstance(error, Silent))

    def _only_answers(self, answers: Mapping[Host, Answer | UserError]) -> dict[Host, Answer]:
        """The answers of all that were asked.

        Raises:
            UserError: one did not answer.
        """
        for answer in answers.values():
            if isinstance(answer, UserError):
                raise answer
        return {host: answer for host, answer in answers.items() if not isinstance(answer, UserError)}

    def _warn(self, failed: Mapping[Host, UserError]) -> None:
        """Tell once of hosts that did not answer."""
        for host, error in failed.items():
            if host not in self._told:
                self._told.add(host)
                print(f"paceline: {error}; what is there is not shown", file=sys.stderr)

    def count(self) -> int:
        """How many jobs there are, of those hosts that answer."""
        if self._count is None:
            self.describe()
        return self._count or 0

    def describe(self, names: Sequence[str] | None = None, since: float | None = None) -> list[Job]:
        """These jobs, or all, the newest first; those that are unknown are left out.

        A job on a host that does not answer is LOST, if it was submitted from here.

        Raises:
            UserError: no host answers, or one does not that may have a job that no other has.
        """
        request = {"do": "describe", "names": None if names is None else list(names), "since": since}
        answers = self._ask(self._hosts, lambda host: request)
        failed = {host: answer for host, answer in answers.items() if isinstance(answer, UserError)}
        parts: dict[tuple[str, str], list[tuple[Host, Answer]]] = {}
        seen: set[str] = set()
        for host, answer in answers.items():
            if not isinstance(answer, UserError):
                seen.update(answer["names"])
                for record in answer["jobs"]:
                    parts.setdefault((record["name"], record["job_id"]), []).append((host, record))
        if names is None:
            self._count = len(seen)
        reasons = {host.name: str(error) for host, error in failed.items()}
        jobs = {}
        for (name, _), found in parts.items():
            jobs[name] = self._merge(found, reasons)
        known = self._sent.on(reasons) if reasons else {}
        for name, (hosts, record) in known.items():
            if name not in jobs and (names is None or name in names):
                self._places[name] = [host for host in self._hosts if host.name in hosts]
                jobs[name] = self._lost(record, next(reasons[host] for host in hosts if host in reasons))
        if failed and names is not None and (unknown := [name for name in names if name not in jobs]):
            raise UserError(f"no job {unknown[0]} on the hosts that answer, and {next(iter(reasons.values()))}")
        if failed and len(failed) == len(self._hosts) and not jobs:
            raise next(iter(failed.values()))
        if names is None:
            self._warn(failed)
            return sorted(jobs.values(), key=lambda job: job.created, reverse=True)
        return [jobs[name] for name in dict.fromkeys(names) if name in jobs]

    def silent(self, name: str) -> list[str]:
        """Why hosts that have a part of a job told nothing of it when it was described, while others did."""
        return self._unheard.get(name, [])

    def _merge(self, parts: list[tuple[Host, Answer]], reasons: Mapping[str, str]) -> Job:
        """A job by what its hosts say, which is remembered; `reasons` are why hosts of these names say nothing."""
        # Those that are in the last attempt come first: from an elastic job others may have gone.
        parts.sort(key=lambda it: (-it[1]["attempt"], not it[1]["has_begun"], it[1]["node_rank"] or 0))
        name = parts[0][1]["name"]
        self._places[name] = [host for host, _ in parts]
        self._living[name] = [host for host, part in parts if part["state"] not in FINAL]
        self._last[name] = [host for host, part in parts if part["attempt"] == parts[0][1]["attempt"]]
        for host, part in reversed(parts):
            self._ranks.update(((name, rank["rank"]), host) for rank in part["instances"])
        named = {host for _, part in parts for host in part["hosts"]}
        is_elastic = any(part["is_elastic"] for _, part in parts)  # then others may have come
        self._unheard[name] = [why for host, why in reasons.items() if is_elastic or host in named]
        asked = ("job_id", "hosts", "node_rank", "is_elastic", "has_begun")
        records = [{k: v for k, v in part.items() if k not in asked} for _, part in parts]
        merged = {**records[0], "backend": self.name}
        last = [part for _, part in parts if part["attempt"] == records[0]["attempt"]]
        begun = [part for part in last if part["has_begun"]]
        count = len(begun) if len(begun) >= records[0]["nodes"] else len(last)  # they come first
        # A part that has not ended is about to be in the last attempt, if it is not there yet.
        there = [r for number, r in enumerate(records) if number < count or r["state"] not in FINAL]
        if len(records) > 1:
            over = [r for r in records[:count] if r["state"] in FINAL and r["exit_code"] is not None]
            knows = bool(over) and (len(over) == count or not is_elastic)
            merged.update(_merged(there, over if knows else there))
            merged["created"] = min(record["created"] for record in records)
            merged["started"] = min((record["started"] for record in records if record["started"]), default=None)
        job = Job.from_record(merged)
        if len(there) < job.nodes and not job.is_over:
            self._unheard[name] = why = self._unheard[name] or list(reasons.values())
            return dataclasses.replace(job, state="LOST", error=(*why, "a part of it is gone from its host")[0])
        return job

    def _lost(self, record: Mapping[str, Any], reason: str) -> Job:
        job = Job.from_record(record)
        return job if job.is_over else dataclasses.replace(job, state="LOST", error=reason)

    def _hosts_of(self, name: str) -> list[Host]:
        """The hosts that have a job, node 0 first.

        Raises:
            UserError: there is no such job.
        """
        if name not in self._places and not self.describe([name]):
            raise UserError(f"no job {name} on {self.name}")
        return self._places[name]

    def spec(self, name: str) -> JobSpec:
        """What a job's user asked for."""
        from paceline.job.spec import JobSpec

        stored = self._hosts_of(name)[0].ask({"do": "spec", "name": name})["spec"]
        if stored["nodes"] != 1:
            stored.update(node_rank=None, main_address=None, main_port=None)
        return JobSpec.model_validate(stored)

    def events(self, name: str) -> list[dict[str, Any]]:
        """What happened to a job; where it has several hosts each event says on which of them."""
        hosts = self._hosts_of(name)
        answers = self._only_answers(self._ask(hosts, lambda host: {"do": "events", "name": name}))
        happened = [
            [{**event, **({"host": host.name} if len(hosts) > 1 else {})} for event in answer["events"]]
            for host, answer in answers.items()
        ]
        return list(heapq.merge(*happened, key=lambda event: event["time"]))

    def nodes(self) -> list[Node]:
        """The hosts that answer."""
        answers = self._ask(self._hosts, lambda host: {"do": "nodes", "slots": host.slots})
        failed = {host: answer for host, answer in answers.items() if isinstance(answer, UserError)}
        if len(failed) == len(answers):
            raise next(iter(failed.values()))
        self._warn(failed)
        return [
            Node(**{**answer["node"], "name": host.name})
            for host, answer in answers.items()
            if not isinstance(answer, UserError)
        ]

    def usage(self, names: Sequence[str]) -> dict[str, Usage]:
        """What these jobs use now, on the hosts that answer; those that do not run are left out."""
        request = {"do": "usage", "names": list(names)}
        answers = self._ask(self._hosts, lambda host: {**request, "slots": host.slots})
        self._warn({host: answer for host, answer in answers.items() if isinstance(answer, UserError)})
        found: dict[str, Usage] = {}
        for answer in answers.values():
            for name, use in {} if isinstance(answer, UserError) else answer["usage"].items():
                other = found.get(name, Usage(0, 0.0, 0))
                found[name] = Usage(
                    other.processes + use["processes"],
                    other.cpu + use["cpu"],
                    other.memory + use["memory"],
                    (*other.gpus, *use["gpus"]),
                )
        return found

    def volumes(self) -> list[Volume]:
        """The volumes that the settings name, each with what keeps a host from reading it."""
        from paceline.job.settings import load

        settings = load()
        answers = self._only_answers(
            self._ask(self._hosts, lambda host: {"do": "volumes", "paths": dict(settings.volumes)})
        )
        found = []
        for name, path in sorted(settings.volumes.items()):
            seen = {host: answer["volumes"][name] for host, answer in answers.items()}
            problem = next((f"{h.name}: {look['problem']}" for h, look in seen.items() if look["problem"]), None)
            first = next(iter(seen.values()))
            file = str(settings.file_of("volumes", name))
            found.append(Volume(name, path, problem, file, first["size"], first["free"]))
        return found

    # -- act -----------------------------------------------------------------------------------------------------------

    def wait(
        self, names: Sequence[str], seconds: float | None = None, tick: Callable[[int], None] = lambda ended: None
    ) -> bool:
        """Come back when these jobs have ended or the time is over; returns whether they have.

        A host that hangs keeps nobody waiting for a job that has ended without it.

        Raises:
            UserError: a host can no longer be reached.
        """
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        look = math.inf  # when to ask whether jobs that have ended somewhere are over
        hosts = list(dict.fromkeys(host for name in names for host in self._hosts_of(name)))
        request = {"do": "wait", "names": list(names)}
        left = {(host, name) for name in names for host in self._hosts_of(name)}
        with contextlib.closing(Streams(hosts, lambda _: request)) as streams:
            while True:
                until = min(deadline, look)
                try:
                    found = streams.next(None if until == math.inf else until - time.monotonic())
                except TimeoutError:
                    if until == deadline:
                        return False
                    look = math.inf
                    over = {job.name for job in self.describe(names) if job.is_over}
                    left = {(host, name) for host, name in left if name not in over}
                    if not left:
                        return True
                    continue
                if found is None:
                    return True
                host, answer = found
                name = answer.get("ended", "")
                left.discard((host, name))
                if host in self._living.get(name, []):
                    self._living[name].remove(host)
                look = time.monotonic() + _CLOSING
                tick(len(set(names) - {name for _, name in left}))

    def stop(self, names: Sequence[str], now: bool = False) -> None:
        """Ask jobs to stop: cleanly, with their grace, or at once. Jobs that have ended are left as they are."""
        self._act({"do": "stop", "names": list(names), "now": now})

    def delete(self, names: Sequence[str]) -> None:
        """Remove jobs that have ended, with all that was written for them.

        Raises:
            UserError: one has not ended everywhere; then nothing is removed.
        """
        for name in names:
            if living := ", ".join(host.name for host in self._hosts_of(name) if host in self._living.get(name, [])):
                at_once = f"paceline delete{self.where} --force {name}"
                raise UserError(f"job {name} has not ended on {living}; end it there with {at_once}")
        if names:
            self._act({"do": "delete", "names": list(names)})
        gone = {host.name for host in self._silent}
        for name in names:
            hosts, _ = self._sent.on(gone).get(name, ([], {}))
            if left := sorted(gone.intersection(hosts)):
                print(
                    f"paceline: {', '.join(left)} does not answer; what it has of job {name} is left there",
                    file=sys.stderr,
                )
            self._sent.forget(name)
            self._places.pop(name, None)

    def forget(self, name: str) -> list[str]:
        """Remove what can be reached of a LOST job, and know it no more; returns where something is left."""
        hosts = self._hosts_of(name)
        self._ask(hosts, lambda _: {"do": "stop", "names": [name], "now": True})
        answers = self._ask(hosts, lambda _: {"do": "delete", "names": [name]})
        self._sent.forget(name)
        self._places.pop(name, None)
        return [host.name for host, answer in answers.items() if isinstance(answer, UserError)]

    def _act(self, request: Request) -> None:
        """Have all hosts do something with their jobs of these names.

        Raises:
            UserError: a host that has one of them does not.
        """
        hosts = list(dict.fromkeys(host for name in request["names"] for host in self._hosts_of(name)))
        self._only_answers(self._ask(hosts, lambda host: request))

    def shell(self, name: str, rank: int, command: Sequence[str]) -> Shell:
        """How to run a command where a rank runs, and as it does."""
        host = self._ranks.get((name, rank)) or self._hosts_of(name)[0]
        request = {"name": name, "rank": rank, "command": list(command)}
        return Shell(tuple(host.shell_command(request, sys.stdin.isatty())), dict(os.environ), os.getcwd())

    def open_tensorboard(self, name: str, logdir: str | None = None) -> str:
        """The address of a job's TensorBoard on its host, which is started if there is none."""
        host = self._hosts_of(name)[0]
        url = str(host.ask({"do": "open_tensorboard", "name": name, "logdir": logdir})["url"])
        port = url.rstrip("/").rpartition(":")[2]
        print(
            f"paceline: it is on {host.name}; reach it with: ssh -L {port}:127.0.0.1:{port} {host.name}",
            file=sys.stderr,
        )
        return url

    def close_tensorboard(self, name: str) -> bool:
        """End it; returns whether there was one."""
        return bool(self._hosts_of(name)[0].ask({"do": "close_tensorboard", "name": name})["ran"])

    # -- logs ----------------------------------------------------------------------------------------------------------

    def logs(self, name: str, query: LogQuery) -> Iterator[LogLines]:
        """Lines of a job in the order in which they were written, of several hosts as they come."""
        hosts = self._hosts_of(name)
        if query.attempt is None:  # others have left an elastic job
            hosts = self._last.get(name, hosts)
        request = {"do": "logs", "name": name, "choice": dataclasses.asdict(query), "checked": len(hosts) == 1}
        streams = Streams(hosts, lambda _: request)
        first = streams.next()  # so that what cannot be met is told at once
        assert first is not None
        lines = _lines(streams)
        if len(hosts) == 1 or query.follow:
            return lines
        return iter(_last(sorted(lines, key=lambda it: (it.attempt, it.time)), query.tail))


def _lines(streams: Streams) -> Iterator[LogLines]:
    with contextlib.closing(streams):
        while (found := streams.next()) is not None:
            if "text" in found[1]:
                moment, attempt, rank, stream = found[1]["text"]
                yield LogLines(moment, attempt, rank, stream, found[1]["data"])


def _last(found: list[LogLines], count: int | None) -> list[LogLines]:
    """The last lines of them."""
    if count is None:
        return found
    kept: list[LogLines] = []
    while found and count > 0:
        it = found.pop()
        lines = it.text.splitlines(keepends=True)[-count:]
        kept.append(it._replace(text=b"".join(lines)))
        count -= len(lines)
    return kept[::-1]


def _merged(records: list[dict[str, Any]], knowing: list[dict[str, Any]]) -> dict[str, Any]:
    """What the hosts of a job's last attempt say together; its state is what those say that know best.

    A host that hangs does not know yet that the job is over.
    """
    states = [record["state"] for record in knowing]
    going = [state for state in _GOING if state in states]
    # One that was killed could not say how the job ended; the others know.
    said = [record["state"] for record in knowing if record["exit_code"] is not None] or states
    ended = next((state for state in ("SUCCEEDED", "FAILED", "LOST") if state in said), "STOPPED")
    state = going[0] if going else ended
    telling = next((record for record in knowing if record["state"] == state), knowing[0])
    is_over = state in FINAL
    return {
        "state": state,
        "exit_code": telling["exit_code"],
        "error": next((record["error"] for record in records if record["error"]), None),
        "waiting": telling["waiting"],
        "finished": max(record["finished"] or 0.0 for record in knowing) if is_over else None,
        "instances": sorted((rank for record in records for rank in record["instances"]), key=lambda r: r["rank"]),
        "devices": [f"{node}:{device}" for node, record in enumerate(records) for device in record["devices"]],
    }


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _sender(file: Path) -> Callable[[IO[bytes]], None]:
    """What sends a file."""

    def send(stdin: IO[bytes]) -> None:
        with open(file, "rb") as source:
            shutil.copyfileobj(source, stdin)

    return send
