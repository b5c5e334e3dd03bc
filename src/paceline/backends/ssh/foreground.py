"""A job on hosts in the foreground: it ends with the client."""

from __future__ import annotations

import math
import signal
from typing import TYPE_CHECKING

from paceline.backends.environments.jobs import equipped
from paceline.backends.follow import Nodes
from paceline.backends.foreground import how_it_ended, terminal_size
from paceline.job.errors import UserError
from paceline.job.text import a_few, counted
from paceline.node.logs.following import Event, Output, Update, update_of
from paceline.node.signals import LEAVE

from .held import GivenUp
from .scaling import Cooldown, Recruiter, code_of, request, taken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.backends.foreground import RankStreams
    from paceline.backends.remote.connection import Host
    from paceline.contract.messages import Invitation, JobAnswer
    from paceline.job.spec import JobSpec

    from .parts import Parts

_PATIENCE = 2.0  # seconds; of hosts that come and go a lost one never reports a restart
_ENDING = 5.0  # seconds in which a host ends its stream that has nothing more to say


class RemoteRun:
    """A job on hosts; their output and events are merged as if they were one machine."""

    def __init__(
        self,
        parts: Parts,
        spec: JobSpec,
        where: str,
        rank_streams: RankStreams,
        *,
        wanted: Callable[[], Sequence[Host]],
        cooldown: Sequence[float] | None,
        containers: str | None,  # see `Options`
    ) -> None:
        """Take over a job that has been started, and go on with it."""
        self.name, self.max_restarts = parts.name, spec.max_restarts
        self._rank_streams = rank_streams
        self._streams = parts.streams
        self._containers = containers
        ranks = sum(answer["ranks"] for answer in parts.started.values())
        self.first_line = (
            f"{counted(ranks, 'rank')} on {a_few([host.name for host in parts.hosts])}; "
            f"see it with: paceline get{where} {parts.name}"
        )
        least, most = spec.node_range
        self._nodes: Nodes[Host] = Nodes(_PATIENCE if least < most else None)
        self._machines = {parts.started[host]["host"]: host for host in parts.hosts}  # by what they call themselves
        for host in parts.hosts:
            self._nodes.enter(host, parts.started[host]["host"], host.name)
        self._apart: set[Host] = set()  # those that could not join
        self._is_interrupted = False
        self._gone: dict[Host, JobAnswer] = {}
        self._reconnect = max(host.reconnect for host in parts.hosts)
        parts.hold()
        self._recruiter: Recruiter | None = None
        if least < most:
            self._recruiter = Recruiter(
                self.name, wanted, lambda: self._nodes.present, self._enter,
                lambda host: self._streams.say(host, f"signal {int(LEAVE)}"), least=least,
                cooldown=None if cooldown is None else Cooldown(cooldown), on_problem=self._hosts_unknown,
            )  # fmt: skip

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ask all hosts to stop the job; asked twice, they stop it at once."""
        if self._recruiter is not None:
            self._recruiter.stop()
        # Two of the same that reach an agent at once are one for it.
        is_second = number == signal.SIGINT and self._is_interrupted
        sent = signal.SIGQUIT if is_second else number
        self._is_interrupted = self._is_interrupted or number == signal.SIGINT
        for host in self._nodes.present:
            self._streams.say(host, f"signal {int(sent)}")
        if is_second:
            self._streams.give_up()

    def pass_on(self, number: int) -> None:
        """Pass a signal on to the agents of all hosts."""
        for host in self._nodes.present:
            self._streams.say(host, f"signal {number}")

    def leads(self, output: Output) -> bool:
        """Whether this is rank 0."""
        return output.rank == 0

    def updates(self) -> Iterator[Update]:
        """What ranks write and what happens, as it comes, until no host has more to say.

        All output of an attempt comes before the event that says how it ended.
        """
        for update in self._nodes.follow(self._next, self._take):
            yield update
            if isinstance(update, Event) and update.name == "restarting":
                failure = update.details["failure"]
                if failure is not None and failure["rank"] is not None and failure["host"] in self._machines:
                    yield from self._leave_out(self._machines[failure["host"]])
        yield from self._nodes.finish()
        if self._recruiter is not None:
            self._recruiter.stop()
        self._streams.finish(_ENDING)
        self._streams.close()

    def _next(self, seconds: float | None) -> tuple[Host, JobAnswer | UserError] | None:
        """The next answer of a host; None if the job has ended on all of them."""
        self._hasten()
        return self._streams.take(seconds) if self._nodes.present or not self._nodes.ends else None

    def _take(self, host: Host, answer: JobAnswer | UserError) -> Iterator[Update]:
        if isinstance(answer, UserError):
            yield from self._lost(host, answer)
        elif "taken" in answer:
            yield from self._lost(host, taken(self.name, host))
        elif "started" in answer:
            yield from self._joined(host, answer)
        elif "gone" in answer:
            self._gone[host] = answer
            yield from self._leave(host)
        elif (update := update_of(answer)) is not None:
            yield from self._nodes.take(host, update)

    def _hasten(self) -> None:
        """Wait for no host without a connection if the others say that the job was stopped, or that a host is lost."""
        if not self._streams.has_lost:
            return
        ends = self._nodes.ends
        if any(it["state"] == "STOPPED" or (it["failure"] and it["failure"]["rank"] is None) for it in ends.values()):
            missing = [host for host in self._nodes.present if host not in ends]
            if missing and all(map(self._streams.is_lost, missing)):
                self._streams.give_up()

    # -- hosts that come and go ----------------------------------------------------------------------------------------

    def _enter(self, host: Host, invited: Invitation) -> None:
        """Start the job's part on a joining host; runs in the recruiter's thread."""
        try:
            [host] = equipped([host], invited, self._containers)
        except UserError as error:  # it is tried again
            self._hosts_unknown(f"{host.name} cannot join: {error}")
            if self._recruiter is not None:
                self._recruiter.is_gone(host)
            return
        self._streams.add(host, request(invited, host, self._rank_streams, terminal_size()), code_of(invited))

    def _hosts_unknown(self, why: str | None) -> None:
        """Report why the present hosts are unknown, or that they are known again; runs in the recruiter's thread."""
        for host in self._nodes.present[:1]:  # it is inserted into the answers of this host
            self._streams.put(host, {"event": "discovery", "details": {"why": why}})

    def _joined(self, host: Host, answer: JobAnswer) -> Iterator[Update]:
        self._machines[answer["host"]] = host
        self._nodes.enter(host, answer["host"], host.name)
        self._apart.discard(host)
        self._gone.pop(host, None)
        self._streams.hold(host, self.name, answer["report"]["part"]["job_id"] or "")
        if self._recruiter is not None:
            self._recruiter.has_come(host)
        yield Event("joined", {"host": host.name})

    def _lost(self, host: Host, why: UserError) -> Iterator[Update]:
        takes_part = host in self._nodes.present
        yield from self._leave(host)
        if takes_part and isinstance(why, GivenUp):
            yield Event("note", {"why": f"{why}; {'it leaves the job' if self._recruiter else 'the job is stopped'}"})
            if self._recruiter is None:
                for other in self._nodes.present:
                    self._streams.say(other, f"signal {int(signal.SIGHUP)}")
        elif takes_part:
            yield Event("lost", {"why": str(why)})
        elif host not in self._gone and host not in self._apart:  # a host that could not join
            self._apart.add(host)
            yield Event("apart", {"why": str(why)})

    def _leave(self, host: Host) -> Iterator[Update]:
        was_asked = self._recruiter is not None and self._recruiter.is_gone(host)
        if host in self._nodes.present and host not in self._nodes.ends and not was_asked:
            yield from self._leave_out(host)
        yield from self._nodes.leave(host)

    def _leave_out(self, host: Host) -> Iterator[Update]:
        """A host has failed: it leaves the job if the others are enough, and may come back later."""
        seconds = 0.0 if self._recruiter is None else self._recruiter.has_failed(host)
        if seconds:
            how_long = "" if seconds == math.inf else f" for {seconds:g} s"
            yield Event(
                "note", {"why": f"{host.name} has failed: while the others are enough, it is left out{how_long}"}
            )

    def unreported_end(self) -> tuple[int, list[str]]:
        """The exit code of the agents with an explanation, or that it is unknown."""
        for host, gone in self._gone.items():
            code, lines = how_it_ended(gone["gone"], gone["pid"], gone["log"], f" on {host.name}")
            if gone["log"] is None:
                lines.append(f"no space is left on {host.name} in {host.root}; free some, or choose another root")
            return code, lines
        when = f"within {self._reconnect:g} s after their connections broke" if self._reconnect else "with this command"
        return 1, [f"no host reported how the job ended; it ends on the hosts {when}"]
