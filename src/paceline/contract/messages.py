"""What a client asks of a machine, and what that answers, in JSON. Types alone: nothing imports this at run time.

In a request, `do` names the verb, `order` is an `Order` of `nodejob` unless something else is said, and `jobs` is the
folder of the jobs below the root where machines share it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Optional, TypedDict, Union

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import NotRequired

    from .facts import BuiltEnvironment, EnvironmentEntry, SlurmFacts, Software
    from .records import (
        CodeRecord,
        DataRecord,
        EventRecord,
        Inventory,
        JobRecord,
        NodeHistory,
        NodeRecord,
        Report,
        UsageRecord,
    )
    from .stands import Stand

Json = dict[str, Any]  # of a record of `nodejob`

# -- jobs that are there -----------------------------------------------------------------------------------------------

_OF_JOB = Literal["spec", "events", "stands", "invite", "inventory", "close_tensorboard", "slurm_events"]
_OF_JOBS = Literal[
    "usage", "losses", "contents", "wait", "delete", "slurm_usage", "slurm_losses", "slurm_wait", "slurm_delete"
]
OfJob = TypedDict("OfJob", {"do": _OF_JOB, "name": str, "jobs": "NotRequired[str]"})
OfJobs = TypedDict("OfJobs", {"do": _OF_JOBS, "names": "Sequence[str]", "jobs": "NotRequired[str]"})


class Describe(TypedDict):
    do: Literal["describe", "slurm_describe"]
    names: Sequence[str] | None  # None for all
    since: float | None  # without those that ended before
    keeps: NotRequired[bool]  # whether those stay whose time to live is over
    seconds: NotRequired[float]  # for which Slurm is asked


class Logs(TypedDict):
    do: Literal["logs", "slurm_logs"]
    name: str
    query: Json  # a `LogQuery`
    checked: NotRequired[bool]  # whether what it asks for is refused if it is not there


class Beside(TypedDict):  # a command in the folder of a rank and with its variables, which takes the place of a request
    name: NotRequired[str]
    root: NotRequired[str]  # the folder of the machine's jobs
    run: NotRequired[str]  # the run directory, instead of name and root, where all machines share it
    rank: int
    command: Sequence[str]


HistoryOf = TypedDict("HistoryOf", {"do": Literal["history", "slurm_history"], "name": str, "since": float})
Stop = TypedDict("Stop", {"do": Literal["stop", "slurm_stop"], "names": "Sequence[str]", "now": bool})
Suspend = TypedDict("Suspend", {"do": Literal["suspend", "slurm_suspend"], "names": "Sequence[str]", "resumes": bool})
Signal = TypedDict("Signal", {"do": Literal["signal"], "name": str, "signal": int})
Leave = TypedDict("Leave", {"do": Literal["leave"], "name": str, "remaining": int})  # nodes that the job has then
OpenTensorboard = TypedDict(
    "OpenTensorboard", {"do": Literal["open_tensorboard"], "name": str, "logdir": Optional[str]}
)
Shell = TypedDict("Shell", {"do": Literal["slurm_shell"], "name": str, "rank": int})
_CARRIED = Literal["code", "checkpoint"]
# `ids` are those of the checkpoints, by the number of the script's run.
Carry = TypedDict(
    "Carry", {"do": Literal["carry"], "name": str, "what": _CARRIED, "ids": "Mapping[str, str]", "fresh": bool}
)
# The client of a held job is back, after its connection broke; it has `seen` so many answers since it held the job.
Rejoin = TypedDict("Rejoin", {"do": Literal["rejoin"], "name": str, "job_id": str, "seen": int})

# -- new jobs ----------------------------------------------------------------------------------------------------------

Start = TypedDict("Start", {"do": Literal["start"], "order": Json})  # the archives of its code and checkpoint follow
# `start` is the first attempt, as a coordinator would send it; None if it is unknown.
Plan = TypedDict("Plan", {"do": Literal["plan"], "order": Json, "start": Optional[Json]})
# `order` is a `SlurmOrder` to check; its `Order`, complete, follows if the job is to be submitted.
SlurmSubmit = TypedDict("SlurmSubmit", {"do": Literal["slurm_submit"], "order": Json})
WantedEnvironment = TypedDict("WantedEnvironment", {"digest": str, "index": Optional[str]})
WantedImage = TypedDict("WantedImage", {"image": str, "program": Optional[str], "needs_devices": bool})


class Preflight(TypedDict):  # what decides whether and where a job can run; then `Route`s may follow
    do: Literal["preflight"]
    name: str  # of the machine, for the others
    token: str  # with which the machines authenticate each other when they try the routes between them
    order: Json | None  # without one, everything that a machine has
    environment: WantedEnvironment | WantedImage | None  # what runs its ranks
    imports: Sequence[str]  # what its script imports, as far as the client has it


PeerRecord = TypedDict("PeerRecord", {"name": str, "address": str, "port": int})


class Route(TypedDict):
    do: str  # "clock", "reach", "latency" or "bandwidth"
    peers: NotRequired[Sequence[PeerRecord]]  # of "reach"
    peer: NotRequired[PeerRecord]  # of "latency" and "bandwidth"


# -- environments, images and warm servers -----------------------------------------------------------------------------


class Environment(WantedEnvironment):
    do: Literal["environment"]


class BuildEnvironment(TypedDict):  # an archive (tar) of `bytes` bytes with what it needs follows
    do: Literal["environment_build"]
    digest: str
    index: Mapping[str, str]  # variables for what installs packages
    source: str  # as the user calls it
    python: str  # the interpreter
    minor: str  # its version
    lines: Sequence[str]  # of a requirements file
    is_closed: bool  # whether all packages are among the files
    is_complete: bool  # whether the lines name all packages
    conda: str | None  # what makes an environment of the lines of an environment.yml; None for others
    bytes: int


PruneEnvironments = TypedDict("PruneEnvironments", {"do": Literal["environment_prune"], "names": "Sequence[str]"})


class Container(WantedImage):
    do: Literal["container"]


class PrepareContainer(WantedImage):
    do: Literal["container_prepare"]
    order: Json
    imports: Sequence[str]


# `seconds`: until it ends unless it is used.
WarmWanted = TypedDict("WarmWanted", {"framework": str, "preload": "Sequence[str]", "ranks": int, "seconds": float})


class WarmStart(WarmWanted):
    do: Literal["warm_start"]
    slots: int


WarmAsk = TypedDict("WarmAsk", {"do": Literal["warm_ask"], "what": Literal["describe", "stop"]})

# -- the machine itself ------------------------------------------------------------------------------------------------

Plain = TypedDict("Plain", {"do": Literal["environment_list", "slurm_nodes"]})
Nodes = TypedDict("Nodes", {"do": Literal["nodes"], "slots": int})
Volumes = TypedDict("Volumes", {"do": Literal["volumes"], "paths": "Mapping[str, str]"})
# With options of sbatch, and how long the job that tries it may wait for its start.
SlurmCheck = TypedDict(
    "SlurmCheck", {"do": Literal["slurm_check"], "slurm": "Mapping[str, str | int | bool]", "seconds": float}
)

Request = Union[
    OfJob, OfJobs, Describe, Logs, HistoryOf, Stop, Suspend, Signal, Leave, OpenTensorboard, Shell, Carry, Rejoin,
    Start, Plan, SlurmSubmit, Preflight, Environment, BuildEnvironment, PruneEnvironments, Container, PrepareContainer,
    WarmStart, WarmAsk, Plain, Nodes, Volumes, SlurmCheck,
]  # fmt: skip

# -- the answers -------------------------------------------------------------------------------------------------------

Named = TypedDict("Named", {"names": list[str]})  # those of the jobs that are there
Described = TypedDict("Described", {"jobs": "list[Report]", "names": list[str]})
# `problem` is why Slurm does not answer.
SlurmDescribed = TypedDict(
    "SlurmDescribed", {"jobs": "Sequence[JobRecord]", "names": list[str], "problem": Optional[str]}
)
SpecAnswer = TypedDict("SpecAnswer", {"spec": Json})  # as it is stored
Inventories = TypedDict("Inventories", {"begin": bool, "inventory": "Inventory", "end": bool}, total=False)
Pieces = TypedDict("Pieces", {"data": bytes, "end": bool}, total=False)  # of an archive
Kept = TypedDict("Kept", {"kept": bool})  # of Slurm's: a job goes on without its client
Ended = TypedDict("Ended", {"ended": str, "end": bool}, total=False)  # the name of a job, at last an end
# The time, attempt, rank and stream of lines, and these; behind a beginning, and before an end.
_LINES = tuple[float, int, int, str]
LogAnswer = TypedDict("LogAnswer", {"begin": bool, "lines": _LINES, "data": bytes, "end": bool}, total=False)
Events = TypedDict("Events", {"events": "list[EventRecord]"})
NodeAnswer = TypedDict("NodeAnswer", {"node": "NodeRecord"})
Usages = TypedDict("Usages", {"usage": "Mapping[str, UsageRecord]"})
StandsAnswer = TypedDict("StandsAnswer", {"stands": "list[Stand]"})
Histories = TypedDict("Histories", {"nodes": "list[NodeHistory]"})
Losses = TypedDict("Losses", {"losses": "dict[str, list[float]]"})
Contents = TypedDict("Contents", {"contents": "dict[str, dict[str, int]]"})
VolumeLook = TypedDict("VolumeLook", {"problem": Optional[str], "size": Optional[int], "free": Optional[int]})
VolumeLooks = TypedDict("VolumeLooks", {"volumes": dict[str, VolumeLook]})
Sent = TypedDict("Sent", {"sent": Optional[bool]})  # whether there is an agent; None if it does not know the signal
Leaves = TypedDict("Leaves", {"leaves": str})
Url = TypedDict("Url", {"url": str})
Ran = TypedDict("Ran", {"ran": bool})
Says = TypedDict("Says", {"says": str})  # what something that takes long has printed last
Built = TypedDict("Built", {"built": "BuiltEnvironment"})
# The command that begins what runs `inside` a container, and what is there.
Pulled = TypedDict("Pulled", {"inside": list[str], "facts": "Software"})
Now = TypedDict("Now", {"now": float})  # seconds since the epoch
Reached = TypedDict("Reached", {"reached": "dict[str, str | None]"})  # why not, for each peer; None if it was
Doing = TypedDict("Doing", {"doing": str})
SlurmChecked = TypedDict("SlurmChecked", {"facts": "SlurmFacts"})


class JobAnswer(TypedDict, total=False):  # one of those about a job that is started, and perhaps followed
    taken: str  # the folder of another job of the name
    end: bool  # there are no more
    # of its start on a host: the job's name there, its ranks, the machine's own name, and what is known of the job
    started: str
    ranks: int
    host: str
    report: Report
    kept: Report  # the same, of one that goes on without its client
    # of its start with Slurm: the batch script to be submitted; then the number and the records
    script: str
    notes: list[str]
    id: str
    record: JobRecord
    others: list[JobRecord]
    # of a followed job: what a rank wrote (attempt, rank, local rank and stream), or an event without its name
    output: tuple[int, int, int, str]
    data: bytes
    event: str
    details: EventRecord
    node: str  # of Slurm's: which one says it; those that come, with the number of the job's start, and leave
    enter: str
    start: int
    leave: str
    waiting: str  # why it waits in Slurm
    ended: JobRecord | None  # how it has
    rejoined: int  # how many orders have arrived, on another connection in the place of one that broke
    gone: int  # the exit code of its agent, its pid, and where its output is
    pid: int
    log: str | None


class WarmRecord(TypedDict):  # a warm server; see `job.job.WarmServer` for each key
    key: str
    pid: int
    preload: list[str]
    python: list[str]
    age: float
    ends_in: float
    jobs: int
    memory: int


Servers = TypedDict("Servers", {"servers": list[WarmRecord]})
Environments = TypedDict("Environments", {"environments": "list[EnvironmentEntry]"})
Removed = TypedDict("Removed", {"removed": list[str]})
Planned = TypedDict("Planned", {"job": Json, "node": Json, "ranks": list[dict[str, str]]})
ShellPlace = TypedDict("ShellPlace", {"run": str, "id": str, "node": str, "is_over": bool})


class SlurmNode(TypedDict):  # cores, bytes of memory and GPUs, in all and allocated
    name: str
    address: str  # "" if it is its name
    partitions: list[str]
    state: str
    reason: str
    cpus: int
    cpus_allocated: int
    memory: int
    memory_allocated: int
    gpus: int
    gpus_allocated: int


SlurmNodes = TypedDict("SlurmNodes", {"nodes": list[SlurmNode]})


class Invitation(TypedDict):  # what another machine needs to take part in a job
    job: Json
    job_id: str
    most: int  # nodes that it can have
    door: tuple[str, int]  # where its coordinator listens
    token: str | None
    secrets: dict[str, str]
    sources: Sequence[DataRecord]
    code: CodeRecord | None
    data: NotRequired[bytes]  # the archive (tar) of the code
    minor: str | None  # of its Python
