"""The messages between the agent and its fork server, and between the agent and the programs that mpirun starts.

Types alone: nothing imports this when a program runs.
"""

from typing import Literal, TypedDict, Union

# agent → fork server

# A rank to start: its variables, the files for its stdout and stderr, and the file for its error record.
RankOrder = TypedDict("RankOrder", {"local_rank": int, "env": dict[str, str], "out": str, "err": str, "error": str})
StartRanks = TypedDict("StartRanks", {"do": Literal["start"], "ranks": list[RankOrder]})
SignalRanks = TypedDict("SignalRanks", {"do": Literal["signal"], "signal": int, "ranks": list[int]})
# Send a signal to the ranks that have a handler for it, and to others, which it would end, once they have one.
PassOn = TypedDict("PassOn", {"do": Literal["pass on"], "signal": int})
# Start a program beside the ranks, with these variables added.
Spawn = TypedDict("Spawn", {"do": Literal["spawn"], "name": str, "command": list[str], "env": dict[str, str]})
# End whatever the ranks left behind: SIGTERM, `grace` seconds, SIGKILL.
Sweep = TypedDict("Sweep", {"do": Literal["sweep"], "grace": float})

ToServer = Union[StartRanks, SignalRanks, PassOn, Spawn, Sweep]

# fork server → agent

# The framework is imported: how ranks will start, why not by fork, and how many seconds it took.
Ready = TypedDict("Ready", {"event": Literal["ready"], "method": str, "why": str, "seconds": float})
Started = TypedDict("Started", {"event": Literal["started"], "local_rank": int, "pid": int})
# With a wait status, at a monotonic time in seconds.
Exited = TypedDict("Exited", {"event": Literal["exited"], "local_rank": int, "status": int, "time": float})
Spawned = TypedDict("Spawned", {"event": Literal["spawned"], "name": str, "pid": int})
Ended = TypedDict("Ended", {"event": Literal["ended"], "name": str, "status": int})  # with a wait status
Swept = TypedDict("Swept", {"event": Literal["swept"]})  # nothing is left of what the ranks started

FromServer = Union[Ready, Started, Exited, Spawned, Ended, Swept]

# a program that mpirun started → agent

# Start mpirun's daemon on a machine, with folders that go first in variables.
DaemonRequest = TypedDict(
    "DaemonRequest", {"do": Literal["daemon"], "host": str, "command": list[str], "folders": dict[str, str]}
)
# Start a rank, with the variables that mpirun has set for it.
RankRequest = TypedDict("RankRequest", {"do": Literal["rank"], "rank": int, "env": dict[str, str]})

FromMpirun = Union[DaemonRequest, RankRequest]
