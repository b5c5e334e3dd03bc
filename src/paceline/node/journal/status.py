"""The state of a node's part of a job. Only types: programs do not import this at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from paceline.contract.records import Failure, OtherFailure, State
    from paceline.contract.stands import Pace


class GuardRecord(TypedDict):
    """Identifies the process above the agent."""

    pid: int
    start_time: int | None


class AgentRecord(TypedDict):
    """Identifies the agent's process: its pid and start time, on which machine, and since which boot of it."""

    pid: int
    start_time: int | None
    host: str
    boot: str
    guard: GuardRecord


class RankRecord(TypedDict):
    """A rank of the current attempt on this node."""

    name: str
    rank: int
    local_rank: int
    node: int
    state: str
    pid: int
    exit_code: int | None
    log: str


class Waiting(TypedDict, total=False):
    """What a job waits for: `need` and `ahead` in the queue for devices; `problem` is why it cannot continue."""

    need: int | tuple[str, ...]
    ahead: int
    problem: str


class _NodeAddress(TypedDict):
    address: str
    slots: int
    ports: list[int]


class NodeEntry(_NodeAddress, total=False):
    """A node of an attempt. `id`, `host` and the port `listen` are missing before the node has joined."""

    id: str
    host: str
    listen: int


class Agreement(TypedDict):
    """The last attempt that an agent has agreed to."""

    id: str
    attempt: int


class Attempt(TypedDict):
    """What a node needs to know of an attempt to place its ranks."""

    attempt: int
    node_rank: int
    nodes: list[NodeEntry]
    main_address: str
    main_port: int
    job: str


class Status(TypedDict, total=False):
    """The whole state, or changes of it."""

    job: str
    job_id: str
    state: State  # never LOST: this state is concluded by readers that cannot reach the agent's machine
    framework: str
    agent: AgentRecord
    nodes: int  # how many nodes the job has, or expects
    node_rank: int | None
    world_size: int | None
    attempt: int  # the number of the current attempt, from 0 on
    restarts: int  # how many restarts after failures there were
    max_restarts: int
    exit_code: int | None
    # created, started, finished: seconds since the epoch; it starts with its first attempt
    created: float
    started: float | None
    finished: float | None
    ranks: list[RankRecord]
    failure: Failure | None  # the first failure, of a job that failed
    others: list[OtherFailure]
    devices: list[str]
    waiting: Waiting | None
    start: Attempt | None  # the current attempt; None before the first one
    coordinator: list[str | int] | None  # address and port of the coordinator
    address: list[str | int] | None  # address and port at which this agent listens for the other agents
    slow: list[str]  # what makes it slow here, a line each, the worst first
    pace: Pace | None  # how much the ranks here wait for others; None if that is not known


class CachedStatus(Status, total=False):
    """The content of status.json: the state, the version, and the position up to which it holds the journal."""

    v: int
    journal: int
