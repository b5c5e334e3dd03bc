"""A job on hosts that somebody watches while it runs, and that ends with whoever does."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from paceline.job.errors import UserError
from paceline.node.following import Event, Output, Update

from .foreground import how_it_ended

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .connection import Answer, Host
    from .parts import Parts

_ENDS_OF_ATTEMPTS = ("restarting", "finished")


class RemoteRun:
    """A job on hosts: what they tell, told as if it were one machine."""

    def __init__(self, parts: Parts, max_restarts: int, where: str) -> None:
        """Take over a job that has been started, and go on with it.

        Args:
            parts: of the job.
            max_restarts: how often it may start again.
            where: the flags that lead to its hosts.
        """
        self.name, self.max_restarts = parts.name, max_restarts
        self._streams = parts.streams
        ranks = sum(answer["ranks"] for answer in parts.started.values())
        names = [host.name for host in parts.hosts]
        listed = f"{', '.join(names[:-1])} and {names[-1]}" if 1 < len(names) < 5 else ", ".join(names)
        if len(names) > 8:
            listed = f"{len(names)} hosts"
        self.first_line = (
            f"{ranks} rank{'' if ranks == 1 else 's'} on {listed}; see it with: paceline get{where} {parts.name}"
        )
        self._host_names = {host: answer["host"] for host, answer in parts.started.items()}
        self._followed = dict.fromkeys(parts.hosts)  # in this order
        self._ends: dict[Host, Event] = {}  # how its attempt ended, until the others have come so far
        self._later: list[tuple[Host, Answer | UserError]] = []
        self._stopping = False  # whether that was told of this attempt
        self._gone: dict[Host, Answer] = {}
        self._lost: dict[Host, str] = {}
        parts.hold()

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ask all hosts to stop the job; asked twice, they stop it at once."""
        for host in self._followed:
            self._streams.say(host, f"signal {int(number)}")

    def leads(self, output: Output) -> bool:
        """Whether this is rank 0."""
        return output.rank == 0

    def updates(self) -> Iterator[Update]:
        """What ranks write and what happens, as it comes, until no host has more to say.

        All output of an attempt comes before the event that tells how the attempt ended.
        """
        while (found := self._streams.take()) is not None:
            yield from self._take(*found)
        self._streams.close()

    def _take(self, host: Host, answer: Answer | UserError) -> Iterator[Update]:
        if host in self._ends:
            self._later.append((host, answer))
            return
        if isinstance(answer, UserError):
            self._followed.pop(host, None)
            if host not in self._gone:
                self._lost[host] = str(answer)
                yield Event("lost", {"why": str(answer)})
        elif "output" in answer:
            attempt, rank, local_rank, stream = answer["output"]
            yield Output(attempt, rank, local_rank, stream, answer["data"])
        elif "gone" in answer:
            self._gone[host] = answer
            self._followed.pop(host, None)
        elif answer.get("event") in _ENDS_OF_ATTEMPTS:
            self._ends[host] = Event(answer["event"], answer["details"])
        elif "event" in answer:
            yield from self._happened(host, answer["event"], answer["details"])
        if self._ends and all(host in self._ends for host in self._followed):
            yield from self._end_attempt()

    def _happened(self, host: Host, name: str, details: dict[str, Any]) -> Iterator[Update]:
        if name == "stopping":
            if self._stopping:
                return
            self._stopping = True
        elif name in ("queued", "granted") and len(self._host_names) > 1:
            details = {**details, "on": host.name}
        yield Event(name, details)

    def _end_attempt(self) -> Iterator[Update]:
        """All have told how the attempt ended: go on with what came behind that."""
        ends, later = self._ends, self._later
        self._ends, self._later, self._stopping = {}, [], False
        yield max(ends.items(), key=self._weight)[1]
        for host, answer in later:
            yield from self._take(host, answer)

    def _weight(self, end: tuple[Host, Event]) -> tuple[bool, bool, bool, bool]:
        """How much the word of a host says: nobody knows better than a rank, and then a host of itself."""
        host, event = end
        failure = event.details.get("failure")
        return (
            event.name == "restarting",
            event.details.get("state") == "FAILED",
            failure is not None and failure["rank"] is not None,
            failure is not None and failure["host"] == self._host_names[host],
        )

    def last_words(self) -> tuple[int, list[str]]:
        """What became of the agents, or that nobody knows."""
        for host, gone in self._gone.items():
            code, lines = how_it_ended(gone["gone"], gone["pid"], gone["log"], f" on {host.name}")
            if gone["log"] is None:
                lines.append(f"no space is left on {host.name} in {host.root}; free some, or choose another root")
            return code, lines
        return 1, ["no host tells how the job ended; it ends there with this connection"]
