"""The messages between nodes and the coordinator of their job; `coordinator` explains them.

Types alone: nothing imports this when a program runs.
"""

from __future__ import annotations

from typing import Literal, Optional, TypedDict, Union

from paceline.contract.records import Failure, FinalState, Outcome
from paceline.contract.stands import Hang, Stand
from paceline.node.journal.status import Agreement, Attempt, NodeEntry

MembershipRecord = TypedDict("MembershipRecord", {"ids": list[str], "leader": str})  # `quorum.Membership`
StandingRecord = TypedDict(  # `quorum.Standing`
    "StandingRecord",
    {"attempt": int, "restarts": int, "agreed": bool, "asked": list[MembershipRecord], "began": float},
)
# Free ports of a node for the next attempt: one for the main port, and one per rank where ranks listen.
Offer = TypedDict("Offer", {"main_port": int, "ports": list[int]})


class AgentStatus(TypedDict):
    """The answer of an agent to an authenticated peer."""

    id: str
    leads: bool
    has_started: bool
    has_begun: bool  # whether it has taken part in an attempt
    has_ended: bool  # whether the job has succeeded
    leader: list[str | int] | None  # address and port of the coordinator; None while that is unknown


# node → coordinator


class Join(Offer):
    do: Literal["join"]
    id: str
    node_rank: int | None
    nodes: list[int]
    slots: int
    host: str
    address: str
    listen: int
    job: str
    version: str
    standing: StandingRecord | None
    former: Agreement | None
    suspended: bool  # whether it has given its devices back


Report = TypedDict(
    "Report",
    {"do": Literal[
        "prepared", "ready", "failed", "symptom", "done", "over", "leave", "called", "suspend", "resume"
    ]},
)  # fmt: skip
LeaveOrStop = TypedDict("LeaveOrStop", {"do": Literal["leave or stop"], "signal": int})
Preempted = TypedDict("Preempted", {"do": Literal["preempted"], "final": bool})
Stop = TypedDict("Stop", {"do": Literal["stop"], "signal": int})


class Stopped(Offer):
    do: Literal["stopped"]
    failures: list[Failure]


GiveUp = TypedDict("GiveUp", {"do": Literal["give up"], "why": str})
Stands = TypedDict("Stands", {"do": Literal["stands"], "after": float, "stands": list[Stand]})
StartDaemon = TypedDict(
    "StartDaemon",
    {"do": Literal["daemon"], "node_rank": int, "attempt": int, "command": list[str], "folders": dict[str, str]},
)

ToCoordinator = Union[Join, Report, LeaveOrStop, Preempted, Stop, Stopped, GiveUp, Stands, StartDaemon]

# coordinator → node

Order = TypedDict("Order", {"do": Literal["go", "last call", "resume"]})
Refuse = TypedDict("Refuse", {"do": Literal["refuse"], "why": str})
Prepare = TypedDict("Prepare", {"do": Literal["prepare"], "nodes": list[NodeEntry]})


class Start(Attempt):
    do: Literal["start"]
    standing: StandingRecord


Hung = TypedDict("Hung", {"do": Literal["hung"], "hang": Optional[Hang]})  # None: it is over
Halt = TypedDict(
    "Halt", {"do": Literal["halt"], "signal": int, "save": bool, "grace": Optional[float], "gone": list[Failure]}
)


class Restart(Outcome):
    do: Literal["restart"]
    attempt: int
    restarts: int
    why: str
    nodes: int


class Suspend(Outcome):
    do: Literal["suspend"]
    attempt: int  # the next one
    restarts: int


class Wait(Outcome):
    do: Literal["wait"]
    why: str


class Finish(Outcome):
    do: Literal["finish"]
    state: FinalState
    exit_code: int


Search = TypedDict("Search", {"do": Literal["search"], "why": str, "dead": list[str]})
# Not sent by a coordinator: it is gone, and this node may not go on without it.
Alone = TypedDict("Alone", {"do": Literal["alone"], "why": str})

ToNode = Union[Order, Refuse, Prepare, Start, Halt, Restart, Suspend, Wait, Finish, Search, Alone, StartDaemon, Hung]
