"""What the nodes of a job write, as if they were one: `logs`, `wait` and the foreground of every backend.

The interface. A backend supplies for each node

- to `lines` a `Source`: the node's lines in their order, of the attempt and from the position that the query names; and
  to `arriving` those of all nodes as they come, until none writes any more. They raise `lost`, a class of `UserError`,
  if a node does not answer, or lines are gone: then the lines of the others are shown, and `Incomplete` follows.
- to `Nodes` the output of its ranks and the records of its journal, in their order, and whether it takes part: `enter`
  when it does, `leave` when it has nothing more to say. A node whose `restarting` is late is waited for until it comes
  or leaves, at most for `patience` seconds.
- to `wait` the names of jobs, each when it has ended.

Each time is of the clock of the node that wrote it. Times decide the order in which finished logs are shown, and
nothing else: `--tail` and `--since` are applied by each node to its own lines.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from paceline.job.errors import UserError
from paceline.node.logs.following import Event, Output
from paceline.node.readers import Ended, Readers, at_once, in_order

from .base import Incomplete, LogLines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from paceline.contract.records import EventRecord
    from paceline.node.logs.following import Update

_AT_ONCE = 64  # nodes whose lines are looked for
_TICK = 0.2  # seconds between two reports of how many jobs have ended
# Events that each node reports.
_ONCE = ("importing", "imported", "stopping", "waiting", "exec", "unjoined", "hang", "suspended", "resuming")
_OF_ONE = ("queued", "granted", "warm", "cold")  # events of one machine

Node = TypeVar("Node")


# -- lines -------------------------------------------------------------------------------------------------------------


class Source(Protocol):
    """The lines of one node."""

    def open(self) -> None:
        """Find out whether there are such lines; to iterate does so too."""

    def __iter__(self) -> Iterator[LogLines]:
        """The lines."""


class Arrivals(Protocol):
    """The lines of several nodes as they come; `Readers` are such."""

    def take(self) -> tuple[Any, LogLines | Ended] | None:
        """A node, and its next lines or its end; None when all have ended."""

    def close(self) -> None:
        """Take no more."""


def lines(
    sources: Mapping[Any, Source], lost: type[UserError], failed: Mapping[Any, UserError] | None = None
) -> Iterator[LogLines]:
    """The lines of all nodes, in the order of time; those of a single one as they come.

    Sources that have been opened together bring the errors of those that could not be.
    """
    failed = opened(sources) if failed is None else failed
    for error in failed.values():
        if not isinstance(error, lost) or len(failed) == len(sources):
            raise error
    return _merged([source for node, source in sources.items() if node not in failed], list(failed.values()), lost)


def opened(sources: Mapping[Node, Source]) -> dict[Node, UserError]:
    """Open several sources at once; returns the errors of those that cannot be."""

    def error_of(source: Source) -> UserError | None:
        try:
            source.open()
        except UserError as error:
            return error
        return None

    errors = dict(zip(sources, at_once(error_of, sources.values(), _AT_ONCE), strict=True))
    return {node: error for node, error in errors.items() if error is not None}


def _merged(sources: list[Source], failed: list[UserError], lost: type[UserError]) -> Iterator[LogLines]:
    def read(source: Source) -> Iterator[LogLines]:
        try:
            yield from source
        except lost as error:
            failed.append(error)

    yield from in_order([read(source) for source in sources])
    _refuse_incomplete(failed)


def arriving(readers: Arrivals, lost: type[UserError]) -> Iterator[LogLines]:
    """The lines as they come, until all readers have ended; see `lines` for errors."""
    failed: list[UserError] = []
    with contextlib.closing(readers):
        for _, found in iter(readers.take, None):
            if isinstance(found, LogLines):
                yield found
            elif isinstance(found.error, lost):
                failed.append(found.error)
            elif found.error is not None:
                raise found.error
    _refuse_incomplete(failed)


def _refuse_incomplete(failed: list[UserError]) -> None:
    if failed:
        raise Incomplete("\n".join(f"{error}; lines of its ranks may be missing" for error in failed))


# -- the end -----------------------------------------------------------------------------------------------------------


def wait(readers: Readers[Any, str], count: int, seconds: float | None, tick: Callable[[int], None]) -> bool:
    """Wait until the readers have named so many jobs; returns whether they have in time."""
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    ended = 0
    with contextlib.closing(readers):
        while ended < count:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            tick(ended)
            with contextlib.suppress(TimeoutError):
                found = readers.take(min(_TICK, remaining))
                if found is None:
                    return True
                if not isinstance(found[1], Ended):
                    ended += 1
                elif found[1].error is not None:
                    raise found[1].error
    tick(ended)
    return True


# -- the foreground ----------------------------------------------------------------------------------------------------


@dataclass
class _Part:
    """What is known of a node.

    Attributes:
        host: as it calls itself.
        name: as its user calls it; "" if events that say what one machine does need none.
        start: which start of the job by its scheduler it belongs to.
        attempt: the last one that it has begun.
    """

    host: str
    name: str = ""
    start: int = 0
    attempt: int = -1


class Nodes(Generic[Node]):
    """The updates of all nodes of a job. All output of an attempt comes before the event that says how it ended."""

    def __init__(self, patience: float | None = None) -> None:  # seconds in which all report a restart
        """Begin without nodes."""
        self._patience = patience
        self._parts: dict[Node, _Part] = {}
        self._present: dict[Node, None] = {}  # those that take part, in the order in which they came
        self._restarts: dict[Node, Event] = {}  # until all nodes have come so far
        self._later: list[tuple[Node, Update]] = []  # of nodes that have
        self._since = 0.0
        self._restarted = (0, -1)  # the last start and attempt whose restart was reported
        self._reported: set[tuple[str, Any]] = set()  # in this attempt
        self._ends: dict[Node, Event] = {}  # how the job ended, as each node has it

    @property
    def present(self) -> list[Node]:
        """Those that take part."""
        return list(self._present)

    @property
    def ends(self) -> dict[Node, EventRecord]:
        """How the job ended, as nodes of the last attempt have it; those that left before know nothing of it."""
        if not self._ends:
            return {}
        last = max(((it.start, it.attempt) for it in self._parts.values()), default=None)
        attempts = {node: (self._parts[node].start, self._parts[node].attempt) for node in self._ends}
        return {node: self._ends[node].details for node, attempt in attempts.items() if attempt == last}

    def enter(self, node: Node, host: str = "", name: str = "", start: int = 0) -> None:
        """A node takes part from now on."""
        self._parts[node], self._present[node] = _Part(host, name, start), None
        self._ends.pop(node, None)

    def leave(self, node: Node) -> Iterator[Update]:
        """A node has nothing more to say."""
        self._present.pop(node, None)
        yield from self._go_on()

    def _seconds(self) -> float | None:
        """How long to wait for nodes that have not reported the restart; None for ever."""
        if self._patience is None or not self._restarts:
            return None
        return max(0.0, self._since + self._patience - time.monotonic())

    def follow(
        self, take: Callable[[float | None], tuple[Any, Any] | None], do: Callable[[Any, Any], Iterator[Update]]
    ) -> Iterator[Update]:
        """What follows from all that the backend gets of the nodes, until there is no more."""
        while True:
            try:
                found = take(self._seconds())
            except TimeoutError:
                yield from self._restart()
                continue
            if found is None:
                break
            yield from do(*found)
        yield from self._restart()

    def take(self, node: Node, update: Update) -> Iterator[Update]:
        """What follows from an update of a node."""
        if node in self._restarts:
            self._later.append((node, update))
        elif isinstance(update, Output):
            yield update
        elif update.name == "restarting":
            if (self._parts[node].start, update.details["attempt"]) > self._restarted:
                self._since = self._since if self._restarts else time.monotonic()
                self._restarts[node] = update
                yield from self._go_on()
        elif update.name == "finished":
            self._ends[node] = update
            yield from self._go_on()
        else:
            yield from self._report(self._parts[node], update)

    def _report(self, part: _Part, event: Event) -> Iterator[Update]:
        name, details = event.name, event.details
        key = name, (details.get("why"), details.get("attempt"))
        if name in _ONCE and key in self._reported:
            return
        self._reported.add(key)
        if name == "started":
            part.attempt = details["attempt"]
        if name in _OF_ONE and part.name and len(self._parts) > 1:
            event = Event(name, {**details, "on": part.name})
        yield event

    def _go_on(self) -> Iterator[Update]:
        if self._restarts and all(node in self._restarts or node in self._ends for node in self._present):
            yield from self._restart()

    def _restart(self) -> Iterator[Update]:
        """Wait no longer for the nodes that have not reported the restart."""
        if not self._restarts:
            return
        restarts, later = self._restarts, self._later
        self._restarts, self._later = {}, []
        self._reported.clear()
        first = max(restarts, key=lambda node: self._weight(node, restarts[node].details))
        self._restarted = self._parts[first].start, restarts[first].details["attempt"]
        yield restarts[first]
        for node, update in later:
            yield from self.take(node, update)

    def finish(self) -> Iterator[Event]:
        """How the job ended, once all nodes have left; nothing if none has reported it."""
        ends = self.ends
        if ends:
            first = max(ends, key=lambda node: self._weight(node, ends[node]))
            took = max((it["took"] for it in ends.values() if it["took"] is not None), default=None)
            yield Event("finished", {**ends[first], "took": took})

    def _weight(self, node: Node, details: EventRecord) -> tuple[int, int, bool, bool, bool]:
        """How reliable a node's report is: a failed rank comes first, then what a node says of itself."""
        part, failure = self._parts[node], details.get("failure")
        return (
            part.start,
            part.attempt,
            details.get("state") == "FAILED",
            failure is not None and failure["rank"] is not None,
            failure is not None and failure["host"] == part.host,
        )
