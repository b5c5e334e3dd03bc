"""What a client asks of a machine, in JSON; `do` names the verb. Only types: programs do not import this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, Union

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import NotRequired

Json = dict[str, Any]  # of a record of `nodejob`


class Request(TypedDict):
    """Something of the machine itself."""

    do: Literal["environment_list", "slurm_nodes"]


class OfJob(TypedDict):
    """Something of a job."""

    do: Literal["spec", "events", "stands", "invite", "inventory", "close_tensorboard", "slurm_events"]
    name: str
    jobs: NotRequired[str]  # the folder of the jobs below the root, if machines share it


class OfJobs(TypedDict):
    """Something of those of these jobs that are there."""

    do: Literal[
        "usage", "losses", "contents", "wait", "delete", "slurm_usage", "slurm_losses", "slurm_wait", "slurm_delete"
    ]
    names: Sequence[str]
    jobs: NotRequired[str]


class Describe(TypedDict):
    """Reports of jobs."""

    do: Literal["describe", "slurm_describe"]
    names: Sequence[str] | None  # None for all
    since: float | None  # without those that ended before
    keeps: NotRequired[bool]  # whether those stay whose time to live is over
    seconds: NotRequired[float]  # for which Slurm is asked


class HistoryOf(TypedDict):
    """What a job has used and logged."""

    do: Literal["history", "slurm_history"]
    name: str
    since: float


class Logs(TypedDict):
    """What ranks wrote."""

    do: Literal["logs", "slurm_logs"]
    name: str
    query: Json  # a `LogQuery`
    checked: NotRequired[bool]  # whether what it asks for is refused if it is not there


class Stop(TypedDict):
    """Jobs are to stop."""

    do: Literal["stop", "slurm_stop"]
    names: Sequence[str]
    now: bool


class Suspend(TypedDict):
    """Jobs are to be suspended, or resumed."""

    do: Literal["suspend", "slurm_suspend"]
    names: Sequence[str]
    resumes: bool


class Signal(TypedDict):
    """Ranks are to get a signal."""

    do: Literal["signal"]
    name: str
    signal: int


class Leave(TypedDict):
    """The machine is to leave a job."""

    do: Literal["leave"]
    name: str
    remaining: int  # how many nodes it has then


class OpenTensorboard(TypedDict):
    """A job's TensorBoard."""

    do: Literal["open_tensorboard"]
    name: str
    logdir: str | None


class Shell(TypedDict):
    """Where a command beside a rank runs."""

    do: Literal["slurm_shell"]
    name: str
    rank: int


class Carry(TypedDict):
    """What a job has there, for one elsewhere that goes on with it."""

    do: Literal["carry"]
    name: str
    what: Literal["code", "checkpoint"]
    ids: Mapping[str, str]  # of the checkpoints, by the number of the script's run
    fresh: bool


class Nodes(TypedDict):
    """The machine, and what of it is in use."""

    do: Literal["nodes"]
    slots: int


class Volumes(TypedDict):
    """Whether paths can be read."""

    do: Literal["volumes"]
    paths: Mapping[str, str]


class WarmWanted(TypedDict):
    """A warm server."""

    framework: str
    preload: Sequence[str]
    ranks: int
    seconds: float  # until it ends unless it is used


class WarmStart(WarmWanted):
    """It is to be started."""

    do: Literal["warm_start"]
    slots: int


class WarmAsk(TypedDict):
    """What each warm server says."""

    do: Literal["warm_ask"]
    what: Literal["describe", "stop"]


class WantedEnvironment(TypedDict):
    """An environment."""

    digest: str
    index: str | None  # where packages come from, if the client says so


class Environment(WantedEnvironment):
    """What a machine has for it."""

    do: Literal["environment"]


class BuildEnvironment(TypedDict):
    """It is to be built; an archive (tar) of `bytes` bytes with what it needs follows."""

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


class PruneEnvironments(TypedDict):
    """Environments are to be removed."""

    do: Literal["environment_prune"]
    names: Sequence[str]


class WantedImage(TypedDict):
    """An image; `program` is what runs it, None chooses."""

    image: str
    program: str | None
    needs_devices: bool


class Container(WantedImage):
    """What a machine has for it."""

    do: Literal["container"]


class PrepareContainer(WantedImage):
    """It is to be there, for the job of an `Order`."""

    do: Literal["container_prepare"]
    order: Json
    imports: Sequence[str]  # what its script imports, as far as the client has it


class Start(TypedDict):
    """An `Order` to start now; the archives of its code and of its checkpoint follow."""

    do: Literal["start"]
    order: Json


class Rejoin(TypedDict):
    """The client of a held job is back, after its connection broke."""

    do: Literal["rejoin"]
    name: str
    job_id: str
    seen: int  # how many answers it has received since it held the job


class Plan(TypedDict):
    """An `Order` to plan."""

    do: Literal["plan"]
    order: Json
    start: Json | None  # the first attempt, as a coordinator would send it; None if it is unknown


class Preflight(TypedDict):
    """What decides whether and where a job can run; without an `Order`, everything that a machine has."""

    do: Literal["preflight"]
    name: str  # of the machine, for the others
    token: str  # with which the machines authenticate each other when they try the routes between them
    order: Json | None
    environment: WantedEnvironment | WantedImage | None  # what runs its ranks
    imports: Sequence[str]


class PeerRecord(TypedDict):
    """A machine, and where it listens for the others."""

    name: str
    address: str
    port: int


class Route(TypedDict):
    """What a machine tries that has answered to `Preflight`."""

    do: str  # "clock", "reach", "latency" or "bandwidth"
    peers: NotRequired[Sequence[PeerRecord]]  # of "reach"
    peer: NotRequired[PeerRecord]  # of "latency" and "bandwidth"


class SlurmSubmit(TypedDict):
    """A `SlurmOrder` to check; its `Order`, complete, follows if the job is to be submitted."""

    do: Literal["slurm_submit"]
    order: Json


class Beside(TypedDict):
    """A command beside a rank, in its folder and with its variables."""

    name: NotRequired[str]
    root: NotRequired[str]  # the folder of the machine's jobs
    run: NotRequired[str]  # the run directory, instead of name and root, where all machines share it
    rank: int
    command: Sequence[str]


class SlurmCheck(TypedDict):
    """What a cluster has."""

    do: Literal["slurm_check"]
    slurm: Mapping[str, str | int | bool]  # options of sbatch
    seconds: float  # for which the job that tries it may wait for its start


AnyRequest = Union[
    Request, OfJob, OfJobs, Describe, HistoryOf, Logs, Stop, Suspend, Signal, Leave, OpenTensorboard, Shell, Carry,
    Nodes, Volumes, WarmStart, WarmAsk, Environment, BuildEnvironment, PruneEnvironments, Container, PrepareContainer,
    Start, Rejoin, Plan, Preflight, SlurmSubmit, SlurmCheck,
]  # fmt: skip
