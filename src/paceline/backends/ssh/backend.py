"""A backend for hosts over ssh. Each host keeps its own jobs, and nothing has to be installed there.

A verb asks all hosts at once, in one round trip each. A host reads its jobs from their run directories, with the same
code as on this machine. This machine only records on which hosts the jobs are that it has submitted.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import math
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, cast
from urllib.parse import urlsplit

from paceline.backends.base import MOST_RANKS, Backend, History, Prepared, Shell
from paceline.backends.remote.connection import Unreachable
from paceline.job.errors import UserError
from paceline.job.job import SILENT, Contents, Node, Usage, Volume, WarmServer
from paceline.job.quantities import duration

from . import target
from .jobs import RemoteJobs
from .target import Hosts, Options, left_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paceline.backends.base import ImageLook, Installer, JobExport, Listing, LogLines, LogQuery, ProgressReporter
    from paceline.backends.check.report import Survey
    from paceline.backends.foreground import RankStreams
    from paceline.backends.remote.connection import Answer, Host
    from paceline.contract import messages
    from paceline.contract.records import EventRecord, NodeHistory
    from paceline.contract.stands import Stand
    from paceline.job.job import Job
    from paceline.job.spec import JobSpec

    from .foreground import RemoteRun
    from .start import RemoteStart


@dataclass(frozen=True)
class _Prepared(Prepared):
    """A job for hosts, with what is needed to start it."""

    parts: RemoteStart | None = None

    def text(self) -> str:
        """The job as its hosts complete it, and the variables of its ranks."""
        assert self.parts is not None
        return json.dumps(self.parts.plan(), indent=2)


class Ssh(Backend):
    """Jobs of this user on machines that ssh reaches."""

    Options: ClassVar = Options
    unsupported: ClassVar[Mapping[str, str]] = {
        "log_dir": "the logs stay on the hosts",
        "queue": "hosts that ssh reaches have no queues of that kind",
        "rendezvous.main_address": "hosts that ssh reaches find each other by themselves",
        "rendezvous.node_rank": "hosts that ssh reaches are numbered by themselves",
        "rendezvous.local_address": "hosts that ssh reaches find out their own names",
    }

    def __init__(self, name: str, options: target.Options, where: str = "") -> None:
        """Make no connection yet."""
        super().__init__(name, options, where)
        self._ssh = options
        self._hosts = Hosts(name, options, are_given=not where.startswith(" --on "))
        self._jobs = RemoteJobs(self._hosts)

    # -- submit --------------------------------------------------------------------------------------------------------

    def prepare(self, spec: JobSpec, *, detached: bool = True) -> Prepared:
        return self._prepared(spec, None, detached=detached)

    def prepare_moved(self, spec: JobSpec, export: JobExport) -> Prepared:
        return self._prepared(spec, export, detached=True)

    def export(self, name: str, *, fresh: bool) -> JobExport:
        from .moving import export_of_hosts

        seen = self._jobs.seen(name)
        return export_of_hosts(seen.hosts, list(seen.unreachable.values()), name, fresh=fresh)

    def _prepared(self, spec: JobSpec, export: JobExport | None, *, detached: bool) -> _Prepared:
        from .start import RemoteStart

        self.refuse_unsupported(spec)
        parts = RemoteStart(self.with_setup(spec), self._hosts, self._jobs, detached=detached, export=export)
        slots = max(host.slots for host in self._hosts.all)
        ranks = parts.spec.ranks
        if ranks == "slots" and slots and self._ssh.host_discovery_script is None:
            ranks = slots
        most = ranks if isinstance(ranks, int) else MOST_RANKS
        return _Prepared(parts.spec, node_ranks=most, installs=parts.installs, parts=parts)

    def start(self, prepared: Prepared, progress: ProgressReporter) -> Job:
        assert isinstance(prepared, _Prepared) and prepared.parts is not None
        with prepared.parts.start(progress) as parts:
            parts.keep()
        return self._jobs.add([(host, parts.reports[host]) for host in parts.hosts])

    def run(self, prepared: Prepared, progress: ProgressReporter, rank_streams: RankStreams) -> RemoteRun:
        from .foreground import RemoteRun

        assert isinstance(prepared, _Prepared) and prepared.parts is not None
        parts = prepared.parts.start(progress, rank_streams)
        self._jobs.add([(host, parts.started[host]["report"]) for host in parts.hosts])
        times = self._ssh.cooldown
        cooldown = None if times is None else [duration(it) or 0.0 for it in times]
        where = self.where_of(parts.name)
        return RemoteRun(
            parts, prepared.spec, where, rank_streams, wanted=self._hosts.wanted, cooldown=cooldown,
            containers=self._hosts.containers,
        )  # fmt: skip

    def scaleout(self, name: str, more: Sequence[str] | int | None) -> list[str]:
        """Add hosts to a job: these, this number, or all other hosts of the target, up to the job's MAX."""
        from .scaling import invitation, join

        living = self._jobs.living_hosts_of(name)
        others = [host for host in self._hosts.all if host not in living]
        chosen = others if more is None else others[:more] if isinstance(more, int) else self._hosts.named(more)
        if there := [host.name for host in chosen if host in living]:
            raise UserError(f"{there[0]} takes part in job {name} already; leave it out")
        if isinstance(more, int) and len(chosen) < more:
            raise UserError(f"{self.name} has {len(chosen)} other hosts for job {name}; ask for fewer")
        invited = invitation(living, name)
        room = invited["most"] - len(living)
        if more is not None and len(chosen) > room:
            raise UserError(f"job {name} takes {room} more of {invited['most']} nodes; name no more")
        chosen = chosen[:room]
        if chosen:
            join(name, chosen, invited, self._hosts.containers)
            self._jobs.join(name, [host.name for host in chosen])
        return [host.name for host in chosen]

    def scalein(self, name: str, fewer: Sequence[str] | int) -> list[str]:
        """Remove these hosts, or the last ones, from a job, which goes on without them."""
        living = self._jobs.living_hosts_of(name)
        chosen = living[max(0, len(living) - fewer) :] if isinstance(fewer, int) else self._hosts.named(fewer)
        if others := [host.name for host in chosen if host not in living]:
            raise UserError(f"{others[0]} takes no part in job {name}; leave it out")
        remaining = len(living) - len(chosen)
        self._hosts.answers(chosen, lambda _: {"do": "leave", "name": name, "remaining": remaining})
        return [host.name for host in chosen]

    def installer(self) -> Installer:
        from paceline.backends.environments.machines import Machines

        return Machines(self._hosts.all)

    def images(self, image: str) -> list[ImageLook]:
        from paceline.backends.containers import look

        return look(self._hosts.all, image, self._hosts.containers)

    def check(self, progress: ProgressReporter) -> Survey:
        """What the hosts have, how they reach each other, and what would go wrong there."""
        from .survey import survey

        return survey(self._hosts, progress)

    # -- look ----------------------------------------------------------------------------------------------------------

    @property
    def machines(self) -> int:
        return len(self._hosts.all)

    def look_until(self, deadline: float) -> None:
        self._hosts.look_until(deadline)

    def say_who_is_waited_for(self, say: Callable[[str], None]) -> None:
        self._hosts.say_who_is_waited_for(say)

    def describe(self, names: Sequence[str] | None = None, since: float | None = None) -> Listing:
        """These jobs, or all, the newest first; those that are unknown are left out.

        A job on a host that does not answer is LOST, if it was submitted from here.
        """
        return self._jobs.describe(names, since)

    def keep_expired(self) -> None:
        self._jobs.keeps_expired = True

    def contents(self, names: Sequence[str]) -> Mapping[str, Contents]:
        """What `delete` would remove of these jobs on the hosts that answer; each may have a part of a checkpoint."""
        hosts = {name: self._jobs.hosts_of(name) for name in names}
        names_on = _names_on(hosts)
        answers, _ = self._hosts.ask(list(names_on), lambda host: {"do": "contents", "names": names_on[host]})
        found: dict[str, Contents] = {}
        for answer in answers.values():
            for name, there in answer["contents"].items():
                other = found.get(name, Contents(0, 0))
                found[name] = Contents(max(other.checkpoints, there["checkpoints"]), other.size + there["size"])
        return found

    def spec(self, name: str) -> JobSpec:
        from paceline.job.spec import JobSpec

        answer: messages.SpecAnswer = self._jobs.hosts_of(name)[0].ask({"do": "spec", "name": name})
        stored = answer["spec"]
        if stored["nodes"] != 1:
            stored.update(node_rank=None, main_address=None, main_port=None)  # as they met, which no user asked for
        return JobSpec.from_stored(stored)

    def events(self, name: str) -> list[EventRecord]:
        """The events of a job; if it has several hosts, each event names its host."""
        hosts = self._jobs.hosts_of(name)
        answers: dict[Host, messages.Events]
        answers = self._hosts.answers(hosts, lambda _: {"do": "events", "name": name})
        for host, answer in answers.items() if len(hosts) > 1 else ():
            for event in answer["events"]:
                event["host"] = host.name
        return list(heapq.merge(*(it["events"] for it in answers.values()), key=lambda event: event["time"]))

    def nodes(self, warn: Callable[[str], None]) -> list[Node]:
        """The hosts, if one answers."""
        answers = self._hosts.some(self._hosts.all, lambda host: {"do": "nodes", "slots": host.slots}, warn)
        return [
            Node(**{**answers[host]["node"], "name": host.name}) if host in answers else _silent(host)
            for host in self._hosts.all
        ]

    def silent_nodes(self) -> list[Node]:
        """The hosts, none of which answers."""
        return list(map(_silent, self._hosts.all))

    def usage(self, names: Sequence[str], warn: Callable[[str], None]) -> dict[str, Usage]:
        """What these jobs use now, on the hosts that answer; those that do not run are left out."""
        request: messages.OfJobs = {"do": "usage", "names": list(names)}
        answers, failed = self._hosts.ask(self._hosts.all, lambda _: request)
        for line in left_out(failed):
            warn(line)
        found: dict[str, Usage] = {}
        for answer in answers.values():
            for name, use in answer["usage"].items():
                other = found.get(name, Usage(0, 0.0, 0))
                found[name] = Usage(
                    other.processes + use["processes"],
                    other.cpu + use["cpu"],
                    other.memory + use["memory"],
                    (*other.gpus, *use["gpus"]),
                )
        return found

    def history(self, name: str, since: float = 0.0) -> History:
        hosts = self._jobs.hosts_of(name)
        warnings: list[str] = []
        request: messages.HistoryOf = {"do": "history", "name": name, "since": since}
        answers = self._hosts.some(hosts, lambda _: request, warnings.append)
        nodes: list[NodeHistory] = []
        for host, answer in answers.items():
            nodes += ({**node, "host": host.name} for node in cast("list[NodeHistory]", answer["nodes"]))
        return History(sorted(nodes, key=lambda node: node["node_rank"]), tuple(warnings))

    def losses(self, names: Sequence[str]) -> dict[str, list[float]]:
        request: messages.OfJobs = {"do": "losses", "names": list(names)}
        answers, _ = self._hosts.ask(self._hosts.all, lambda _: request)
        return {name: found for answer in answers.values() for name, found in answer["losses"].items()}

    def stands(self, name: str) -> list[Stand]:
        """Where the ranks of a job are that runs, on the hosts that answer; takes some seconds."""
        hosts = self._jobs.hosts_of(name)
        answers = self._hosts.answers(hosts, lambda _: {"do": "stands", "name": name})
        return [stand for answer in answers.values() for stand in answer["stands"]]

    def start_warm(self, wanted: messages.WarmWanted, warn: Callable[[str], None]) -> list[WarmServer]:
        def request(host: Host) -> messages.WarmStart:
            return {"do": "warm_start", **wanted, "slots": host.slots}

        return _servers(self._hosts.answers(self._hosts.all, request))

    def ask_warm(self, what: Literal["describe", "stop"], warn: Callable[[str], None]) -> list[WarmServer]:
        return _servers(self._hosts.some(self._hosts.all, lambda _: {"do": "warm_ask", "what": what}, warn))

    def volumes(self, warn: Callable[[str], None]) -> list[Volume]:
        """The volumes of the settings, each with the first host that cannot read it, and why."""
        from paceline.job.settings import load

        settings = load()
        request: messages.Volumes = {"do": "volumes", "paths": dict(settings.volumes)}
        answers, failed = self._hosts.ask(self._hosts.all, lambda _: request)
        if not answers:
            raise next(iter(failed.values()))
        for error in failed.values():
            warn(f"{error}; whether it can read them is not known")
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
        """Wait until these jobs have ended, or the time is over; returns whether they have ended.

        A host that hangs, or can no longer be reached, is not waited for if its job has ended on the other hosts.
        """
        from .wait import Waiting

        deadline = math.inf if seconds is None else time.monotonic() + seconds
        return Waiting(self._jobs, names, deadline, tick).until_over()

    def stop(self, names: Sequence[str], now: bool = False) -> Mapping[str, str]:
        """Ask jobs to stop, on all hosts that answer; returns why others did not."""
        return self._tell(names, lambda there: {"do": "stop", "names": there, "now": now})

    def suspend(self, names: Sequence[str]) -> Mapping[str, str]:
        return self._tell(names, lambda there: {"do": "suspend", "names": there, "resumes": False})

    def resume(self, names: Sequence[str]) -> Mapping[str, str]:
        return self._tell(names, lambda there: {"do": "suspend", "names": there, "resumes": True})

    def _tell(
        self, names: Sequence[str], request: Callable[[list[str]], messages.Stop | messages.Suspend]
    ) -> Mapping[str, str]:
        """Send an order for jobs to all their hosts that answer; returns why others did not get it."""
        hosts = {name: self._jobs.to_change(name).all for name in names}
        names_on = _names_on(hosts)
        answers, failed = self._hosts.ask(list(names_on), lambda host: request(names_on[host]))
        for error in failed.values():
            if not answers or not isinstance(error, Unreachable):
                raise error
        return {
            name: ", ".join(str(failed[host]) for host in those if host in failed)
            for name, those in hosts.items()
            if not failed.keys().isdisjoint(those)
        }

    def can_stop(self, name: str) -> bool:
        """Whether a part of a LOST job runs on a host that answers, or may run on another one while some answer."""
        seen = self._jobs.seen(name)
        return bool(seen.living or seen.unreachable)

    def unended_on(self, name: str) -> list[str]:
        """The hosts where a part of a job has not ended."""
        return [host.name for host in self._jobs.seen(name).living]

    def delete(self, names: Sequence[str]) -> list[str]:
        """Remove jobs that have ended everywhere, or none; returns what is left on hosts that do not answer."""
        for name in names:
            if unended := ", ".join(self.unended_on(name)):
                at_once = f"paceline delete{self.where_of(name)} --force {name}"
                raise UserError(f"job {name} has not ended on {unended}; end it there with {at_once}")
        hosts = {name: self._jobs.to_change(name).hosts for name in names}
        if names:
            names_on = _names_on(hosts)
            self._hosts.answers(list(names_on), lambda host: {"do": "delete", "names": names_on[host]})
        notes = []
        for name in names:
            if silent := self._jobs.submitted_to(name, self._hosts.unreachable):
                notes.append(f"{', '.join(silent)} does not answer; what it has of job {name} is left there")
            self._jobs.forget(name)
        return notes

    def forget(self, name: str) -> list[str]:
        hosts = self._jobs.to_change(name).all
        self._hosts.ask(hosts, lambda _: {"do": "stop", "names": [name], "now": True})
        _, failed = self._hosts.ask(hosts, lambda _: {"do": "delete", "names": [name]})
        self._jobs.forget(name)
        return [host.name for host in failed]

    def shell(self, name: str, rank: int, command: Sequence[str], *, terminal: bool = False) -> Shell:
        seen = self._jobs.seen(name)
        host = seen.ranks.get(rank, seen.hosts[0])  # that of node 0 if it is not known
        request: messages.Beside = {"name": name, "rank": rank, "command": list(command)}
        return Shell(tuple(host.shell_command(request, terminal)), dict(os.environ), os.getcwd())

    def open_tensorboard(self, name: str, logdir: str | None, warn: Callable[[str], None]) -> str:
        """The address of a job's TensorBoard on its host, which is started if there is none."""
        host = self._jobs.hosts_of(name)[0]
        url = str(host.ask({"do": "open_tensorboard", "name": name, "logdir": logdir})["url"])
        warn(f"it is on {host.name}; {self.reach_tensorboard(name, url)}")
        return url

    def reach_tensorboard(self, name: str, url: str) -> str:
        port = urlsplit(url).port
        assert port is not None
        return f"reach it with: {self._jobs.hosts_of(name)[0].forward(port)}"

    def close_tensorboard(self, name: str) -> bool:
        return bool(self._jobs.hosts_of(name)[0].ask({"do": "close_tensorboard", "name": name})["ran"])

    # -- logs ----------------------------------------------------------------------------------------------------------

    def logs(self, name: str, query: LogQuery) -> Iterator[LogLines]:
        from paceline.backends.follow import arriving, lines
        from paceline.backends.remote.crowd import at_once, need_files
        from paceline.backends.remote.lines import RemoteLines

        from .streams import Followed

        # Of an elastic job some hosts may have left, and have nothing of its last attempt.
        seen = self._jobs.seen(name)
        hosts = seen.last if query.attempt is None else seen.hosts
        need_files(len(hosts))
        request: messages.Logs = {
            "do": "logs",
            "name": name,
            "query": dataclasses.asdict(query),
            "checked": len(hosts) == 1,
        }
        if query.follow and len(hosts) > 1:
            return arriving(Followed(hosts, request), Unreachable)
        sources = {host: RemoteLines(host, request) for host in hosts}
        found = at_once(sources, lambda host: sources[host].begin())
        return lines(sources, Unreachable, {host: error for host, error in found.items() if error is not None})


def _servers(answers: Mapping[Host, Answer]) -> list[WarmServer]:
    return [WarmServer(host.name, **each) for host, answer in answers.items() for each in answer["servers"]]


def _names_on(hosts: Mapping[str, Sequence[Host]]) -> dict[Host, list[str]]:
    """The jobs on each of their hosts; another job of the name of one of the others may be there, too."""
    found: dict[Host, list[str]] = {}
    for name, those in hosts.items():
        for host in dict.fromkeys(those):
            found.setdefault(host, []).append(name)
    return found


def _silent(host: Host) -> Node:
    return Node(host.name, (), {}, 0.0, 0.0, 0, 0, 0, 0, state=SILENT, measured=False)
