"""What happens to an agent, and what it does then; `decider` decides. Types alone: nothing imports this at run time."""

from typing import Literal, TypedDict, Union

from paceline.contract.records import Cause, Failure
from paceline.contract.stands import Stand
from paceline.node.journal.records import Record
from paceline.node.journal.status import Status, Waiting
from paceline.node.rendezvous.messages import Start, StartDaemon, ToCoordinator, ToNode

# Events. `begin`: the agent works; `met`: it knows the coordinator; `ranks changed`: a rank or the fork server has;
# `go on`: actions were carried out, or a message is still to be acted on; `time`: a deadline is reached; `elsewhere`:
# its scheduler has started the job on another node; `close`: the end is decided, and nothing may be left running.
Plain = TypedDict("Plain", {"on": Literal["begin", "met", "ranks changed", "go on", "time", "elsewhere", "close"]})
Queued = TypedDict("Queued", {"on": Literal["queued"], "waiting": Waiting})  # for devices
Granted = TypedDict("Granted", {"on": Literal["granted"], "devices": list[str]})
# `asked to stop` is the same from a file, and of a signal that stops the job.
Signal = TypedDict("Signal", {"on": Literal["signal", "asked to stop"], "signal": int})
# The process that waits for the job has sent a byte (see `node/lifeline.py`), or none, and has ended.
Word = TypedDict("Word", {"on": Literal["word"], "word": bytes})
# The job cannot go on here; `broken`: because the agent cannot.
Failed = TypedDict("Failed", {"on": Literal["failed", "broken"], "why": str, "cause": Cause, "exit_code": int})
# None of the ranks here goes on, and this is where they are; or they do again, and there are none.
Stalled = TypedDict("Stalled", {"on": Literal["stalled"], "stands": list[Stand]})
Received = TypedDict("Received", {"on": Literal["message"], "message": ToNode})  # from the coordinator

Event = Union[Plain, Queued, Granted, Signal, Word, Failed, Stalled, Received]

# Actions. `claim`: queue for devices; `release`: give them back; `warm up`: start the fork server; `meet`: find the
# coordinator, or be it; `save`: ask the ranks to save their state and end; `kill`, `end server`: end the ranks, or the
# server and all; `stopped`: none is left; `die`: end at once, and all with it; `close`: leave the job, and release
# everything.
Do = TypedDict(
    "Do",
    {"do": Literal["claim", "release", "warm up", "meet", "save", "kill", "end server", "stopped", "die", "close"]},
)
# Record what happened, and what changes in the status; `save` replaces status.json too.
Write = TypedDict("Write", {"do": Literal["write"], "records": list[Record], "changes": Status, "save": bool})
Send = TypedDict("Send", {"do": Literal["send"], "message": ToCoordinator})
# No rank is left here; with fresh ports for the next attempt.
SendStopped = TypedDict("SendStopped", {"do": Literal["send stopped"], "failures": list[Failure]})
Launch = TypedDict("Launch", {"do": Literal["launch"], "start": Start})  # the ranks of an attempt
Daemon = TypedDict("Daemon", {"do": Literal["daemon"], "order": StartDaemon})  # mpirun's
# To the ranks that handle it; `terminate`: SIGTERM to all, or SIGINT to those that want it if the job is stopped by it.
SignalRanks = TypedDict("SignalRanks", {"do": Literal["signal", "terminate"], "signal": int})
Sweep = TypedDict("Sweep", {"do": Literal["sweep"], "grace": float})  # end what the ranks have left behind
# Find the agent that coordinates the job now, or be it.
SearchOthers = TypedDict("SearchOthers", {"do": Literal["search"], "dead": list[str], "until": float})

Action = Union[Do, Write, Send, SendStopped, Launch, Daemon, SignalRanks, Sweep, SearchOthers]
