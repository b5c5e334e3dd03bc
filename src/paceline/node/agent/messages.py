"""What happens to an agent, and what it does then; `decider` decides. Types alone: nothing imports this at run time."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Union

from paceline.contract.records import Cause
from paceline.contract.stands import Stand
from paceline.node.journal.records import Record
from paceline.node.journal.status import Failure, Waiting
from paceline.node.rendezvous.messages import Start, StartDaemon, ToCoordinator, ToNode

# -- events ------------------------------------------------------------------------------------------------------------


class Plain(TypedDict):
    """An event that says all by its name.

    `begin`: the agent works; `met`: it knows the coordinator; `ranks changed`: a rank or the fork server has; `go on`:
    actions were carried out, or a message is still to be acted on; `time`: a deadline is reached; `elsewhere`: its
    scheduler has started the job on another node; `close`: the end is decided, and nothing may be left running.
    """

    on: Literal["begin", "met", "ranks changed", "go on", "time", "elsewhere", "close"]


class Queued(TypedDict):
    """The job waits for devices."""

    on: Literal["queued"]
    waiting: Waiting


class Granted(TypedDict):
    """It has them."""

    on: Literal["granted"]
    devices: list[str]


class Signal(TypedDict):
    """A signal has come; `asked to stop` is the same from a file, and of a signal that stops the job."""

    on: Literal["signal", "asked to stop"]
    signal: int


class Word(TypedDict):
    """The process that waits for the job has sent a byte (see `node/lifeline.py`), or none, and has ended."""

    on: Literal["word"]
    word: bytes


class Failed(TypedDict):
    """The job cannot go on here; `broken`: because the agent cannot."""

    on: Literal["failed", "broken"]
    why: str
    cause: Cause
    exit_code: int


class Stalled(TypedDict):
    """None of the ranks here goes on, and this is where they are; or they do again, and there are none."""

    on: Literal["stalled"]
    stands: list[Stand]


class Received(TypedDict):
    """A message of the coordinator."""

    on: Literal["message"]
    message: ToNode


Event = Union[Plain, Queued, Granted, Signal, Word, Failed, Stalled, Received]

# -- actions -----------------------------------------------------------------------------------------------------------


class Do(TypedDict):
    """An action that says all by its name.

    `claim`: queue for devices; `warm up`: start the fork server; `meet`: find the coordinator, or be it; `save`: ask
    the ranks to save their state and end; `kill`, `end server`: end the ranks, or the server and all; `stopped`: none
    is left; `die`: end at once, and all with it; `close`: leave the job, and release everything.
    """

    do: Literal["claim", "warm up", "meet", "save", "kill", "end server", "stopped", "die", "close"]


class Write(TypedDict):
    """Record what happened, and what changes in the status; `save` replaces status.json too."""

    do: Literal["write"]
    records: list[Record]
    changes: dict[str, Any]
    save: bool


class Send(TypedDict):
    """Send the coordinator a message."""

    do: Literal["send"]
    message: ToCoordinator


class SendStopped(TypedDict):
    """Tell it that no rank is left here, with fresh ports for the next attempt."""

    do: Literal["send stopped"]
    failures: list[Failure]


class Launch(TypedDict):
    """Start the ranks of an attempt."""

    do: Literal["launch"]
    start: Start


class Daemon(TypedDict):
    """Start mpirun's daemon."""

    do: Literal["daemon"]
    order: StartDaemon


class SignalRanks(TypedDict):
    """Send a signal to the ranks that handle it.

    `terminate`: SIGTERM to all, or SIGINT to those that want it if the job is stopped by that.
    """

    do: Literal["signal", "terminate"]
    signal: int


class Sweep(TypedDict):
    """End what the ranks have left behind."""

    do: Literal["sweep"]
    grace: float


class SearchOthers(TypedDict):
    """Find the agent that coordinates the job now, or be it."""

    do: Literal["search"]
    dead: list[str]
    until: float


Action = Union[Do, Write, Send, SendStopped, Launch, Daemon, SignalRanks, Sweep, SearchOthers]
