"""The messages between the agent and its fork server, and between the agent and the programs that mpirun starts.

Types alone: nothing imports this when a program runs.
"""

from __future__ import annotations

from typing import Literal, TypedDict, Union

# agent → fork server


class RankOrder(TypedDict):
    """A rank to start: its variables, the files for its stdout and stderr, and the file for its error record."""

    local_rank: int
    env: dict[str, str]
    out: str
    err: str
    error: str


class StartRanks(TypedDict):
    """Start these ranks."""

    do: Literal["start"]
    ranks: list[RankOrder]


class SignalRanks(TypedDict):
    """Send a signal to these local ranks."""

    do: Literal["signal"]
    signal: int
    ranks: list[int]


class PassOn(TypedDict):
    """Send a signal to the ranks that have a handler for it, and to others, which it would end, once they have one."""

    do: Literal["pass on"]
    signal: int


class Spawn(TypedDict):
    """Start a program beside the ranks, with these variables added."""

    do: Literal["spawn"]
    name: str
    command: list[str]
    env: dict[str, str]


class Sweep(TypedDict):
    """End whatever the ranks left behind: SIGTERM, `grace` seconds, SIGKILL."""

    do: Literal["sweep"]
    grace: float


ToServer = Union[StartRanks, SignalRanks, PassOn, Spawn, Sweep]

# fork server → agent


class Ready(TypedDict):
    """The framework is imported: how ranks will start, why not by fork, and how many seconds it took."""

    event: Literal["ready"]
    method: str
    why: str
    seconds: float


class Started(TypedDict):
    """A rank runs."""

    event: Literal["started"]
    local_rank: int
    pid: int


class Exited(TypedDict):
    """A rank has ended with a wait status, at a monotonic time in seconds."""

    event: Literal["exited"]
    local_rank: int
    status: int
    time: float


class Spawned(TypedDict):
    """A program beside the ranks runs."""

    event: Literal["spawned"]
    name: str
    pid: int


class Ended(TypedDict):
    """A program beside the ranks has ended with a wait status."""

    event: Literal["ended"]
    name: str
    status: int


class Swept(TypedDict):
    """Nothing is left of what the ranks started."""

    event: Literal["swept"]


FromServer = Union[Ready, Started, Exited, Spawned, Ended, Swept]

# a program that mpirun started → agent


class DaemonRequest(TypedDict):
    """Start mpirun's daemon on a machine, with folders that go first in variables."""

    do: Literal["daemon"]
    host: str
    command: list[str]
    folders: dict[str, str]


class RankRequest(TypedDict):
    """Start a rank, with the variables that mpirun has set for it."""

    do: Literal["rank"]
    rank: int
    env: dict[str, str]


FromMpirun = Union[DaemonRequest, RankRequest]
