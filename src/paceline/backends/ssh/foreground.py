"""A job on hosts in the foreground: it ends with the client."""

from __future__ import annotations

import dataclasses
import signal
import time
from typing import TYPE_CHECKING, Any

from paceline.backends.foreground import how_it_ended, terminal_size
from paceline.job.errors import UserError
from paceline.node.logs.live import Event, Output, Update
from paceline.node.signals import LEAVE

from .elastic import Recruiter, code_of, order, taken
from .held import GivenUp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.backends.foreground import Shown
    from paceline.backends.remote.connection import Answer, Host

    from .parts import Parts

_PATIENCE = 2.0  # seconds
_ENDING = 5.0  # seconds in which a host ends its stream that has nothing more to say


class RemoteRun:
    """A job on hosts; their output and events are merged as if they were one machine."""

    def __init__(
        self, parts: Parts, max_restarts: int, where: str, shown: Shown, wanted: Callable[[], Sequence[Host]] | None
    ) -> None:
        """Take over a job that has been started, and go on with it.

        Args:
            parts: of the job.
            max_restarts: how often it may start again.
            where: the flags that lead to its hosts.
            shown: what of its output is shown.
            wanted: the hosts that it is to have as soon as they can be reached; None for a job that never has others.
        """
        self.name, self.max_restarts, self._shown = parts.name, max_restarts, dataclasses.asdict(shown)
        self._streams = parts.streams
        ranks = sum(answer["ranks"] for answer in parts.started.values())
        self.first_line = (
            f"{ranks} rank{'' if ranks == 1 else 's'} on {_listed([host.name for host in parts.hosts])}; "
            f"see it with: paceline get{where} {parts.name}"
        )
        self._host_names = {host: answer["host"] for host, answer in parts.started.items()}
        self._followed = dict.fromkeys(parts.hosts)  # in this order
        self._attempts: dict[Host, int] = {}  # the last one that each has started
        self._ends: dict[Host, Event] = {}  # how its attempt ended, until the others have come so far
        self._ends_since = 0.0
        self._later: list[tuple[Host, Answer | UserError]] = []
        self._said: set[tuple[str, Any]] = set()  # of this attempt, what several hosts say
        self._restarted = -1  # the last attempt whose restart was reported
        self._is_over = self._is_interrupted = False
        self._gone: dict[Host, Answer] = {}
        self._reconnect = max(host.reconnect for host in parts.hosts)
        parts.hold()
        self._recruiter: Recruiter | None = None
        if wanted is not None:
            self._recruiter = Recruiter(
                self.name, wanted, lambda: list(self._followed), self._enter,
                lambda host: self._streams.say(host, f"signal {int(LEAVE)}"), on_problem=self._hosts_unknown,
            )  # fmt: skip

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ask all hosts to stop the job; asked twice, they stop it at once."""
        if self._recruiter is not None:
            self._recruiter.stop()
        # Two of the same that reach an agent at once are one for it.
        is_second = number == signal.SIGINT and self._is_interrupted
        said = signal.SIGQUIT if is_second else number
        self._is_interrupted = self._is_interrupted or number == signal.SIGINT
        for host in list(self._followed):
            self._streams.say(host, f"signal {int(said)}")
        if is_second:
            self._streams.give_up()

    def leads(self, output: Output) -> bool:
        """Whether this is rank 0."""
        return output.rank == 0

    def updates(self) -> Iterator[Update]:
        """What ranks write and what happens, as it comes, until no host has more to say.

        All output of an attempt comes before the event that says how it ended.
        """
        while self._followed or not self._is_over:
            try:
                found = self._streams.take(self._patience())
            except TimeoutError:
                yield from self._end_attempt()
                continue
            if found is None:
                break
            yield from self._take(*found)
        if self._ends:
            yield from self._end_attempt()
        if self._recruiter is not None:
            self._recruiter.stop()
        self._streams.finish(_ENDING)
        self._streams.close()

    def _patience(self) -> float | None:
        """How long to wait for other hosts to report the restart; a host that was lost never does."""
        if self._recruiter is not None and any(event.name != "finished" for event in self._ends.values()):
            return max(0.0, self._ends_since + _PATIENCE - time.monotonic())
        return None

    def _take(self, host: Host, answer: Answer | UserError) -> Iterator[Update]:
        if host in self._ends:
            self._later.append((host, answer))
            return
        if isinstance(answer, UserError):
            yield from self._lost(host, answer)
        elif "taken" in answer:
            yield from self._lost(host, taken(self.name, host))
        elif "started" in answer:
            yield from self._joined(host, answer)
        elif "output" in answer:
            attempt, rank, local_rank, stream = answer["output"]
            yield Output(attempt, rank, local_rank, stream, answer["data"])
        elif "gone" in answer:
            self._gone[host] = answer
            self._forget(host)
        elif "event" in answer:
            yield from self._happened(host, Event(answer["event"], answer["details"]))
        self._hasten()
        if self._ends and all(host in self._ends for host in self._followed):
            yield from self._end_attempt()

    def _hasten(self) -> None:
        """Wait for no host without a connection if the others say that the job was stopped, or that a host is lost."""
        ended = [end.details for end in self._ends.values() if end.name == "finished"]
        if any(it["state"] == "STOPPED" or (it["failure"] and it["failure"]["rank"] is None) for it in ended):
            missing = [host for host in self._followed if host not in self._ends]
            if missing and all(map(self._streams.is_lost, missing)):
                self._streams.give_up()

    def _happened(self, host: Host, event: Event) -> Iterator[Update]:
        name, details = event.name, event.details
        if name in ("restarting", "finished"):
            has_left = name == "finished" and self._has_left(host, max(self._attempts.values(), default=-1))
            if not has_left and (name == "finished" or details["attempt"] > self._restarted):
                self._ends_since = self._ends_since if self._ends else time.monotonic()
                self._ends[host] = event
            return
        if name in ("stopping", "waiting", "exec", "unjoined"):
            what = (name, details.get("why"))
            if what in self._said:
                return
            self._said.add(what)
        elif name == "started":
            self._attempts[host] = details["attempt"]
            yield from self._let_go(details["attempt"])
        elif name in ("queued", "granted", "warm", "cold") and len(self._host_names) > 1:
            event = Event(name, {**details, "on": host.name})
        yield event

    def _has_left(self, host: Host, attempt: int) -> bool:
        """Whether a host that has ended takes no part in an attempt of others."""
        return self._attempts.get(host, -1) < attempt

    def _let_go(self, attempt: int) -> Iterator[Update]:
        """Of the hosts that have ended those do not count that left before this attempt began."""
        left = [
            host for host, event in self._ends.items() if event.name == "finished" and self._has_left(host, attempt)
        ]
        if not left:
            return
        for host in left:
            del self._ends[host]
        later, self._later = self._later, []
        for host, answer in later:
            yield from self._take(host, answer)

    def _end_attempt(self) -> Iterator[Update]:
        """Yield how the attempt ended, and then what came after it."""
        ends, later = self._ends, self._later
        self._ends, self._later = {}, []
        self._said.clear()
        event = max(ends.items(), key=self._weight)[1]
        if event.name == "restarting":
            self._restarted = event.details["attempt"]
        else:
            self._is_over = True
            longest = max(end.details["took"] for end in ends.values() if end.name == "finished")  # others came later
            event = Event(event.name, {**event.details, "took": longest})
        yield event
        for host, answer in later:
            yield from self._take(host, answer)

    def _weight(self, end: tuple[Host, Event]) -> tuple[bool, int, bool, bool, bool]:
        """How reliable a host's report is: a failed rank comes first, then what a host says of itself."""
        host, event = end
        failure = event.details.get("failure")
        return (
            event.name == "restarting",
            self._attempts.get(host, -1),  # who has left before knows nothing of the rest
            event.details.get("state") == "FAILED",
            failure is not None and failure["rank"] is not None,
            failure is not None and failure["host"] == self._host_names[host],
        )

    # -- hosts that come and go ----------------------------------------------------------------------------------------

    def _enter(self, host: Host, invited: Answer) -> None:
        """Start the job's part on a joining host; runs in the recruiter's thread."""
        self._streams.add(host, order(invited, host, self._shown, terminal_size()), code_of(invited))

    def _hosts_unknown(self, why: str | None) -> None:
        """Report why the present hosts are unknown, or that they are known again; runs in the recruiter's thread."""
        for host in list(self._followed)[:1]:  # it is inserted into the answers of this host
            self._streams.put(host, {"event": "discovery", "details": {"why": why}})

    def _joined(self, host: Host, answer: Answer) -> Iterator[Update]:
        self._host_names[host] = answer["host"]
        self._followed[host] = None
        self._gone.pop(host, None)
        self._streams.hold(host, self.name, answer["report"]["part"]["job_id"])
        if self._recruiter is not None:
            self._recruiter.has_come(host)
        yield Event("joined", {"host": host.name})

    def _lost(self, host: Host, why: UserError) -> Iterator[Update]:
        is_followed = host in self._followed
        self._forget(host)
        if is_followed and isinstance(why, GivenUp):
            yield Event("note", {"why": f"{why}; {'it leaves the job' if self._recruiter else 'the job is stopped'}"})
            if self._recruiter is None:
                for other in self._followed:
                    self._streams.say(other, f"signal {int(signal.SIGHUP)}")
        elif is_followed:
            yield Event("lost", {"why": str(why)})
        elif host not in self._gone and ("apart", host) not in self._said:  # a host that could not join
            self._said.add(("apart", host))
            yield Event("apart", {"why": str(why)})

    def _forget(self, host: Host) -> None:
        self._followed.pop(host, None)
        self._attempts.pop(host, None)
        if self._recruiter is not None:
            self._recruiter.is_gone(host)

    def unreported_end(self) -> tuple[int, list[str]]:
        """The exit code of the agents with an explanation, or that it is unknown."""
        for host, gone in self._gone.items():
            code, lines = how_it_ended(gone["gone"], gone["pid"], gone["log"], f" on {host.name}")
            if gone["log"] is None:
                lines.append(f"no space is left on {host.name} in {host.root}; free some, or choose another root")
            return code, lines
        when = f"within {self._reconnect:g} s after their connections broke" if self._reconnect else "with this command"
        return 1, [f"no host reported how the job ended; it ends on the hosts {when}"]


def _listed(names: list[str]) -> str:
    if len(names) > 8:
        return f"{len(names)} hosts"
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
