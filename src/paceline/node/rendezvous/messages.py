"""The messages between nodes and the coordinator of their job; `coordinator` explains them.

Types alone: nothing imports this when a program runs.
"""

from __future__ import annotations

from typing import Literal, TypedDict, Union

from paceline.contract.records import FinalState
from paceline.contract.stands import Hang, Stand
from paceline.node.journal.status import Agreement, Attempt, Failure, NodeEntry, Outcome


class MembershipRecord(TypedDict):
    """The fields of `quorum.Membership`."""

    ids: list[str]
    leader: str


class StandingRecord(TypedDict):
    """The fields of `quorum.Standing`."""

    attempt: int
    restarts: int
    agreed: bool
    asked: list[MembershipRecord]
    began: float


class Offer(TypedDict):
    """Free ports of a node for the next attempt: one for the main port, and one per rank where ranks listen."""

    main_port: int
    ports: list[int]


class AgentStatus(TypedDict):
    """What an agent answers to an authenticated peer: its id, and which agent coordinates the job.

    `leader` is the address and port of the coordinator, None while that is unknown; `has_begun` says whether the agent
    has taken part in an attempt, `has_ended` whether the job has succeeded.
    """

    id: str
    leads: bool
    has_started: bool
    has_begun: bool
    has_ended: bool
    leader: list[str | int] | None


# node → coordinator


class Join(Offer):  # noqa: D101
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


class Report(TypedDict):  # noqa: D101
    do: Literal["prepared", "ready", "failed", "symptom", "done", "over", "leave", "called"]


class LeaveOrStop(TypedDict):  # noqa: D101
    do: Literal["leave or stop"]
    signal: int


class Preempted(TypedDict):  # noqa: D101
    do: Literal["preempted"]
    final: bool


class Stop(TypedDict):  # noqa: D101
    do: Literal["stop"]
    signal: int


class Stopped(Offer):  # noqa: D101
    do: Literal["stopped"]
    failures: list[Failure]


class GiveUp(TypedDict):  # noqa: D101
    do: Literal["give up"]
    why: str


class Stands(TypedDict):  # noqa: D101
    do: Literal["stands"]
    after: float
    stands: list[Stand]


class StartDaemon(TypedDict):  # noqa: D101
    do: Literal["daemon"]
    node_rank: int
    attempt: int
    command: list[str]
    folders: dict[str, str]


ToCoordinator = Union[Join, Report, LeaveOrStop, Preempted, Stop, Stopped, GiveUp, Stands, StartDaemon]

# coordinator → node


class Order(TypedDict):  # noqa: D101
    do: Literal["go", "last call"]


class Refuse(TypedDict):  # noqa: D101
    do: Literal["refuse"]
    why: str


class Prepare(TypedDict):  # noqa: D101
    do: Literal["prepare"]
    nodes: list[NodeEntry]


class Start(Attempt):  # noqa: D101
    do: Literal["start"]
    standing: StandingRecord


class Hung(TypedDict):  # noqa: D101
    do: Literal["hung"]
    hang: Hang


class Halt(TypedDict):  # noqa: D101
    do: Literal["halt"]
    signal: int
    save: bool
    grace: float | None
    gone: list[Failure]


class Restart(Outcome):  # noqa: D101
    do: Literal["restart"]
    attempt: int
    restarts: int
    why: str
    nodes: int


class Wait(Outcome):  # noqa: D101
    do: Literal["wait"]
    why: str


class Finish(Outcome):  # noqa: D101
    do: Literal["finish"]
    state: FinalState
    exit_code: int


class Search(TypedDict):  # noqa: D101
    do: Literal["search"]
    why: str
    dead: list[str]


class Alone(TypedDict):
    """Not sent by a coordinator: it is gone, and this node may not go on without it."""

    do: Literal["alone"]
    why: str


ToNode = Union[Order, Refuse, Prepare, Start, Halt, Restart, Wait, Finish, Search, Alone, StartDaemon, Hung]
