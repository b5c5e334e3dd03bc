"""The records that nodes send and clients show. Only types: programs do not import this at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, Union

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import NotRequired

    from .stands import Hang, Pace, Place, Spent

State = Literal["PENDING", "STARTING", "RUNNING", "RESTARTING", "SUSPENDED", "SUCCEEDED", "FAILED", "STOPPED", "LOST"]
FinalState = Literal["SUCCEEDED", "FAILED", "STOPPED"]
ProgramKind = Literal["script", "module", "command"]  # `python file`, `python -m name`, or any executable
# Of a rank: it raised an exception, ended with an exit code, was killed by a signal, or because memory ran out. Of a
# node: it was lost, others did not come, it was refused, or its request was; a command of the setup failed there; the
# job reached its time limit; its ranks gave way to another job; its client is gone; it runs elsewhere now; or
# paceline's own processes have failed. Of all: a rank kept the others waiting.
Cause = Literal[
    "exception", "exit", "signal", "out of memory",
    "node lost", "nodes missing", "refused", "setup", "time limit", "preempted", "client gone", "elsewhere", "agent",
    "hang",
]  # fmt: skip
Value = Union[str, int, float, bool, None, "Sequence[Value]", "Mapping[str, Value]"]


class InstanceRecord(TypedDict):
    """A rank; see `paceline.job.job.Instance`."""

    name: str
    node: str
    rank: int
    state: str
    pid: int | None
    exit_code: int | None


class CheckpointRecord(TypedDict):
    """The checkpoint that was saved last."""

    step: int
    folder: str


class KeptCheckpoint(TypedDict):
    """The newest whole checkpoint of a job; `ids` are those of its runs' checkpoints, by the number of the run."""

    serial: int
    step: int
    folder: str
    ids: dict[str, str]


class Inventory(TypedDict):
    """What a job has on a machine, for a job that resumes it on other machines."""

    code: CodeRecord | None  # of its copy of the code; None if it has none
    checkpoint_dir: str | None  # the folder for checkpoints that its user named; None if it is the job's own
    saved: CheckpointRecord | None  # the step and folder that the library has saved last; None if it has saved nothing
    checkpoint: KeptCheckpoint | None  # the newest one; None if there is none
    bytes: int  # of what is sent: the checkpoints, and other files beside them
    files: int  # how many these are
    # where its folder is: in the "run" directory, in the copy of the "code", or another "folder"
    place: Literal["run", "code", "folder"]
    path: str  # of that folder: relative to the run directory or to the code, or absolute
    # the name of the volume in which that folder is, and its path there; None if it is in none
    volume: list[str] | None
    has_others: bool  # whether there are files in a folder of the user that are not paceline's checkpoints


class FaultRecord(TypedDict):
    """A kind of fault, and the module, path, program, library or image that it is about; "" if that is not known."""

    kind: str
    about: str


class Failure(TypedDict):
    """How a rank failed, or a node. `node.failure` makes it."""

    cause: Cause  # decides what follows; `message` is for people
    rank: int | None  # its rank, or None when a node or paceline's own process failed
    node: int  # node rank
    host: str
    pid: int  # process id there
    exit_code: int  # 0 … 255; 128 + N for signal N
    signal: str  # name of the signal that killed it, or ""
    oom: bool  # whether the kernel killed it because memory ran out
    message: str  # the exception's last line, or what else is known, in one line
    traceback: str  # what it printed last: the traceback, or the end of its log if there is none
    has_traceback: bool  # whether `traceback` is one
    log: str
    symptom: bool  # whether it looks like the consequence of another rank's end
    ended: float  # when it failed, in seconds on the monotonic clock of its machine
    age: float  # seconds since then when it was reported. The clocks of nodes differ, ages hardly do.
    advice: str  # what to do about it, if its message is a usual one, or ""
    fault: FaultRecord | None  # what kind of one it is then
    # the last one of each process group that a rank had entered which an exception ended, in words; "" if that is not
    # known
    collectives: str


class ErrorRecord(TypedDict):
    """What a rank records of the exception that ends it."""

    type: str  # its name; `ExitCode` and `Preempted` are no exceptions of the script
    message: str
    traceback: str
    time: float  # on the monotonic clock of its machine
    pid: int
    log_start: int | None  # where its traceback is in the rank's log; None if that is not known, or not yet
    log_end: int | None
    collectives: NotRequired[str]  # see `Failure`


class OtherFailure(TypedDict, total=False):
    """A failure that is not the first one: where it was, its message, and its last lines; see `Failure`."""

    rank: int | None
    node: int
    message: str
    traceback: str
    collectives: str


class Outcome(TypedDict):
    """What failed: the first failure in full, the others in short; None and none if nothing did."""

    failure: Failure | None
    others: list[OtherFailure]


class LogFiles(TypedDict, total=False):
    """The files of a rank; `out` and `err` are one file unless its streams are apart. Only its node has the files."""

    rank: int
    local_rank: int
    out: str
    err: str
    error: str


class EventFacts(TypedDict, total=False):
    """What an event says; which keys there are depends on the event."""

    time: float  # seconds since the epoch
    event: str
    host: str | None  # where the job has several
    on: str | list[str]  # the machine, or those of its ranks
    why: str | None
    message: str  # of a cluster, or of a node that does not answer
    nodes: int
    world_size: int
    resume_from: str | None
    devices: int | Sequence[str] | None  # that are asked for, or that it has got
    need: int | Sequence[str]
    ahead: int
    problem: str | None
    what: str | list[str]
    seconds: float
    attempt: int
    restarts: int
    logs: list[LogFiles]
    hang: Hang
    places: list[Place]
    spent: Spent
    causes: list[str]
    signal: int
    grace: float
    state: str
    exit_code: int | None
    failure: Failure | None
    others: list[OtherFailure]
    took: float | None  # seconds from its start to its end
    pid: int
    step: int
    folder: str
    path: str
    url: str | None
    left_out: int  # how many events this one stands for


class EventRecord(EventFacts, total=False):
    """Something that happened to a job.

    Nodes record most of it, see `node.journal.records`. Clients add what only they know: `submitted`, `requeued`,
    `silent`, and warnings of a cluster, which are named after their reasons.
    """

    ranks: int


class TracebackRecord(TypedDict):
    """The last lines of the traceback that ended a rank."""

    rank: int
    text: str


class SyncRecord(TypedDict):
    """How ranks exchange gradients, and what that costs a rank in a step, on average."""

    method: str
    sent_bytes: int
    sync_seconds: float
    step_seconds: float


class ReplicasRecord(TypedDict):
    """How often all ranks had equal parameters, and the last step after which they were seen to."""

    compared: int
    step: int


class TrialRecord(TypedDict):
    """What a trial of `paceline tune` measured in each step.

    `method` is None if nothing is exchanged, `samples` is the mean per step, `settings` are those that were used.
    """

    method: str | None
    seconds: list[float]
    bytes: list[int]
    losses: list[float | None]
    samples: float
    settings: list[str]


class ProgressRecord(TypedDict, total=False):
    """How far the training is, as the library writes it."""

    time: float
    epoch: int
    epochs: int | None
    step: int
    steps: int | None
    samples_per_second: float
    epoch_seconds_left: float | None
    seconds_left: float | None
    sync: SyncRecord | None
    replicas: ReplicasRecord | None
    metrics: dict[str, float | None]
    began: float  # when the first step of this process began; without it nothing counts its steps
    steps_per_minute: float | None
    trial: TrialRecord


class CodeRecord(TypedDict, total=False):
    """The copy of the code; `ref` and `commit` are git's, `secret` is what holds its credentials in a cluster."""

    path: str
    mode: str
    source: str
    ref: str | None
    commit: str | None
    secret: str | None
    files: int
    bytes: int


class DataRecord(TypedDict, total=False):
    """A volume of a job; `problem` is why it is not visible where it is wanted, `mount` whether it is mounted there."""

    volume: str
    path: str
    wanted: str
    visible: bool
    mount: bool
    variable: str
    problem: str | None


class ContainerRecord(TypedDict):
    """The container in which a job's agent and ranks run; see `node.machine.containers`."""

    program: str
    image: str
    binds: Sequence[str]  # folders that it shows
    devices: NotRequired[bool]  # whether it shows the machine's accelerators


class AllocationRecord(TypedDict):
    """An allocation of Slurm's that the user of a job has made: its number, and how many of its nodes the job uses."""

    id: str
    nodes: int


class SlurmOptions(TypedDict):
    """What only Slurm knows of a job; `no_kill` is whether it goes on without a node that is lost."""

    slurm: Mapping[str, str | int | bool]  # options of sbatch
    chain: bool
    array: str | None
    no_kill: bool
    container: ContainerRecord | None
    python: str
    limit: NotRequired[float | None]  # the time limit that Slurm sets, in seconds


class SlurmOutcome(TypedDict, total=False):
    """What the batch script of a Slurm job, or what waits for its step, has decided at the end of a start."""

    next: str | None
    state: FinalState
    exit_code: int
    why: str
    cause: Cause
    time: float


class GpuRecord(TypedDict):
    """A GPU; see `paceline.job.job.Node`."""

    index: int
    uuid: str
    name: str
    use: float | None
    memory: int | None
    memory_used: int | None
    temperature: float | None
    power: float | None


class GpuUseRecord(TypedDict):
    """What a job uses of a device; see `paceline.job.job.Usage`."""

    device: str
    use: float | None
    memory: int | None


class UsageRecord(TypedDict):
    """What a job uses on a machine; see `paceline.job.job.Usage`."""

    processes: int
    cpu: float
    memory: int
    gpus: tuple[GpuUseRecord, ...]


class Capacity(TypedDict):
    """What a machine, or its control group, has: cores, and bytes of memory and of a disk; and what is in use of it."""

    cores: float
    memory: int
    memory_used: int
    disk: int
    disk_used: int


class NodeRecord(Capacity):
    """A machine that runs jobs; see `paceline.job.job.Node`."""

    load: float
    gpus: tuple[GpuRecord, ...]
    name: str
    address: str
    devices: tuple[str, ...]
    allocated: dict[str, tuple[str, ...]]
    slots: bool
    machine: str


class JobUse(TypedDict):
    """What a job uses on a node: cores that it keeps busy, bytes of memory, bytes per second of its disks."""

    processes: int
    cpu: float
    memory: int
    read: float
    written: float


class MachineUse(Capacity):
    """What a node has and what is in use there, and bytes per second of its network."""

    load: float
    received: float
    sent: float


class RanksUse(TypedDict, total=False):
    """What each rank of a node uses, a column each; None is what is not known."""

    rank: list[int]  # of the job
    # cpu, memory, read, written: as in `JobUse`, with the processes that it has started. Memory that it shares with
    # other processes counts in none.
    cpu: list[float | None]
    memory: list[int | None]
    read: list[float | None]
    written: list[float | None]
    # data, compute, exchange, checkpoint, evaluation, logging, script, idle, other: shares of the time, which together
    # are 1. `script` is what the script does itself, `idle` where it sleeps or waits. Older records have no evaluation,
    # script and idle, which are in `compute`, and no logging, which is in `other`.
    data: list[float | None]
    compute: list[float | None]
    exchange: list[float | None]
    checkpoint: list[float | None]
    evaluation: list[float | None]
    logging: list[float | None]
    script: list[float | None]
    idle: list[float | None]
    other: list[float | None]
    steps: list[float | None]  # per second, if it trains with the library


class GpusUse(TypedDict):
    """The GPUs that a job has on a node, a column each: see `GpuRecord`."""

    index: list[int]
    use: list[float | None]
    memory: list[int | None]
    memory_used: list[int | None]
    temperature: list[float | None]
    power: list[float | None]


class Telemetry(TypedDict):
    """A line of telemetry.jsonl: means over the last `seconds` before `time`, on one node."""

    time: float  # seconds since the epoch
    seconds: float  # for which it stands
    job: JobUse
    machine: MachineUse
    ranks: RanksUse
    gpus: NotRequired[GpusUse]  # only where there are some


class MetricsRecord(TypedDict):
    """What a script has logged, a column each; None is what was not logged, or is no number."""

    time: list[float]  # seconds since the epoch
    step: list[int]  # over all attempts
    values: dict[str, list[float | None]]  # name → a value for each time
    last: dict[str, float | None]  # name → the value that was logged last; None if it is not finite


class NodeHistory(TypedDict):
    """What a node has written about its part of a job while that ran."""

    host: str  # its name; "" if it is unknown
    node_rank: int  # of the job
    telemetry: list[Telemetry]  # lines in the order of time
    metrics: MetricsRecord | None  # None on nodes that have none
    software: dict[str, str]  # name → version, of what the job runs with, as far as that is known
    # of the code that ran: `commit`, `branch`, and `diff`, its difference to the commit
    origin: NotRequired[dict[str, str]]
    missing: list[str]  # lines about what cannot be read, for people


class JobFacts(TypedDict):
    """What is known of a job before it runs; see `paceline.job.job.Job` for each key.

    `nodes` and `ranks` are the expected numbers.
    """

    name: str
    backend: str
    framework: str | None
    nodes: int
    ranks: int
    created: float
    max_restarts: int
    devices_asked: int | Sequence[str] | None
    resume_from: str | None
    priority: int
    queue: str | None
    image: str | None
    labels: Mapping[str, str]
    options: Mapping[str, Value]
    ttl: float | None
    grace: float
    command: str
    working_dir: str
    folder: str
    code: CodeRecord | None
    data: Sequence[DataRecord]
    tensorboard: str | None
    environment: str | None
    time_limit: float | None
    user: str | None


class JobState(TypedDict):
    """What changes while a job runs; see `paceline.job.job.Job` for each key."""

    state: State
    attempt: int
    exit_code: int | None
    started: float | None
    finished: float | None
    instances: list[InstanceRecord]
    error: str | None
    cause: Cause | None
    advice: str | None
    fault: FaultRecord | None
    traceback: TracebackRecord | None
    waiting: str | None
    restarts: int
    devices: list[str]
    kept_since: float | None
    progress: ProgressRecord | None
    checkpoint: CheckpointRecord | None
    slow: Sequence[str]


class JobRecord(JobFacts, JobState):
    """All that the verbs show of a job."""


class Part(TypedDict):
    """One node's part of a job, as `node.journal.fold.part_of` makes it. Hosts send it to clients."""

    state: State  # what its agent recorded last; PENDING before it recorded anything
    alive: bool | None  # whether a process works on it; None if that is not known
    why: str  # why nothing works on it although no end is recorded, or why it is not known whether something does
    host: str
    node_rank: int
    has_begun: bool  # whether it takes part in an attempt, or did
    is_in_attempt: bool  # whether it takes part in this attempt, or did; else it is about to
    # nodes, ranks: how many the job has, if its agent knows it
    nodes: int | None
    ranks: int | None
    job_id: str | None  # identifies the job on all its machines
    hosts: Sequence[str]  # names of the job's nodes as the user gave them; empty if unknown
    is_elastic: bool  # whether nodes may come and go
    attempt: int
    restarts: int
    exit_code: int | None
    started: float | None
    finished: float | None  # when it ended; without a recorded end, when it wrote its last file
    noticed: float | None  # when it was seen first that it has ended, if it recorded no end
    instances: list[InstanceRecord]
    failing_rank: int | None  # the rank that failed first; None if a node failed, or nothing
    error: str | None
    cause: Cause | None
    advice: str | None
    fault: FaultRecord | None
    traceback: TracebackRecord | None
    waiting: str | None  # what it waits for, in one line
    devices: list[str]
    progress: ProgressRecord | None
    checkpoint: CheckpointRecord | None
    slow: list[str]  # what makes it slow, a line each, the worst first
    pace: Pace | None  # how much its ranks wait for others; None if that is not known


class Report(TypedDict):
    """What a machine knows of a job: a host sends it to a client, which folds the reports of all hosts."""

    job: JobFacts
    part: Part
