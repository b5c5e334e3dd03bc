"""A job on its way from a client to its ranks: what nodes read of it, and what a client asks each of them to make.

A client sends these records in JSON; nodes keep the job in `job.json`.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

    from .records import AllocationRecord, CheckpointRecord, CodeRecord, DataRecord, ProgramKind, SlurmOptions, Value


@dataclass(frozen=True, repr=False, eq=False)
class Record:
    """A record that is sent or stored in JSON.

    Attributes:
        parts: the fields that are such records themselves.
    """

    parts: ClassVar[Mapping[str, type[Record]]] = {}

    # Once for all, as dataclass compiles its own anew for each class whenever a command starts.
    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def to_json(self) -> dict[str, Any]:
        """The record as JSON has it."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Read what `to_json` of this or another version has made: what is unknown is left out."""
        values = {it.name: stored[it.name] for it in fields(cls) if it.name in stored}
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
            elif value is not None and name in cls.parts:
                values[name] = cls.parts[name].from_json(value)
        return cls(**values)

    def shared(self, kind: type[Record]) -> dict[str, Any]:
        """The fields that this record has from a kind of records, for another one of that kind."""
        return {it.name: getattr(self, it.name) for it in fields(kind)}


@dataclass(frozen=True, repr=False, eq=False)
class Running(Record):
    """How a job runs: what its user asks for, and its agents take as it is."""

    setup: tuple[str, ...] = ()  # shell commands that run before the fork server starts, which gets their variables
    preload: tuple[str, ...] = ()  # modules the fork server imports before it forks the first rank
    main_address: str | None = None  # where the agents find the first coordinator; None on a single node
    main_port: int | None = None  # its port; on a single node the main port of the ranks; None picks a free one
    local_address: str | None = None  # address at which the other nodes reach this one; None: it is detected
    join_timeout: float = 600.0  # seconds to wait for the other nodes
    last_call: float = 3.0  # seconds to wait for more nodes when there are enough
    silence: float = 10.0  # seconds without a packet after which a node counts as lost; see `rendezvous.silence`
    max_restarts: int = 0  # how many times all ranks may start again after a failure
    grace: float = 30.0  # seconds between SIGTERM and SIGKILL when the job is stopped
    pass_index: bool = False  # append `--process_index I --process_num N` to the arguments
    role: str = "default"  # torchrun's role name
    # which cores near its GPU a rank is bound to, see `machine/numa.py`; None binds none
    numa_binding: str | None = None
    virtual_local_rank: bool = False  # each rank sees only its own GPU, and has LOCAL_RANK 0
    run_id: str | None = None  # torchrun's --rdzv-id: identical on all nodes of a job, and on no others
    # seconds after the first start of the ranks at which the job is stopped; None for no limit
    time_limit: float | None = None
    detached: bool = False  # the job outlives the process that started it and its terminal


@dataclass(frozen=True, repr=False, eq=False)
class Circumstances(Record):
    """What a job meets that its user has not asked for, and its agents take as it is."""

    hosts: tuple[str, ...] = ()  # names of the nodes as the user gave them, by node rank; empty if unknown
    joins: bool = False  # the job has started on other nodes: this one never coordinates its first attempt
    first_attempt: int = 0  # the number of the first attempt: a scheduler that starts a job again goes on counting
    restarts: int = 0  # how many restarts the job had before this agent began, as far as others have noted it
    began: float | None = None  # when the job's first agent began, in seconds since the epoch; None if that is this one
    # a file on a disk that all nodes share, and what it holds while this is where the job runs: a scheduler that has
    # lost a node may start the job elsewhere while the node still works. None if that cannot be.
    current: tuple[str, str] | None = None
    # a file on a disk that all nodes share; it holds the number of a signal once somebody has asked to stop the job:
    # the signal itself may be lost on its way through a scheduler. Beside it, `SIGNALS` gets a line with the number of
    # each signal for the ranks, and `SUSPENDED` holds `HOLD` while the scheduler is to hold the job. None if there is
    # none.
    stop_file: str | None = None
    # where the agents of all nodes listen, by node rank, if another node comes for one that is lost, with its rank and
    # its name; empty if none is replaced
    peers: tuple[str, ...] = ()
    # a local rank, and the file that is its standard input; that of all others is empty
    stdin: tuple[int, str] | None = None


@dataclass(frozen=True, repr=False, eq=False)
class NodeJob(Running):
    """A job as nodes read it: what its user asks for, or that as a node has completed it; see `job.spec.JobSpec`."""

    name: str = ""
    script: str | None = None
    module: str | None = None
    command: str | None = None
    args: tuple[str, ...] = ()
    framework: str | None = None
    horovod: str | None = None
    nodes: int | str = 1
    ranks: int | str = 1
    devices: int | tuple[str, ...] | None = None
    share_devices: bool = False
    cpus: int | None = None
    memory: int | None = None
    image: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    environment: str | None = None
    environment_digest: str | None = None
    working_dir: str = "."
    code: CodeRecord | None = None
    data: tuple[DataRecord, ...] = ()
    tensorboard: bool = False
    tensorboard_dir: str | None = None
    log_dir: str | None = None
    checkpoint_dir: str | None = None
    resume_from: str | None = None
    fresh: bool = False
    start_method: str | None = None
    keep_warm: float | str | None = None
    ttl: float | None = None
    priority: int = 0
    queue: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    backend: str = "local"
    options: Mapping[str, Value] = field(default_factory=dict)
    hang: str = "warn"
    hang_after: float = 60.0
    use_env: bool = False
    node_rank: int | None = None
    user: str | None = None  # who has submitted it

    @property
    def program(self) -> tuple[ProgramKind, str]:
        """What each rank runs: "script", "module" or "command", and its name."""
        if self.script is not None:
            return "script", self.script
        if self.module is not None:
            return "module", self.module
        return "command", self.command or ""

    @property
    def node_range(self) -> tuple[int, int]:
        """The least and the most nodes."""
        low, _, high = str(self.nodes).partition(":")
        return int(low), int(high or low)


@dataclass(frozen=True, repr=False, eq=False)
class RankStreams(Record):
    """Which streams of which local ranks are shown, in torchrun's numbers: 1 stdout, 2 stderr, 3 both.

    Attributes:
        first: on the host of rank 0.
        others: on the other hosts of a run.
        split: the local ranks whose stderr is separate from stdout.
        several: whether more than one rank is shown.
        stdin: the local rank that reads this process's standard input; None if no rank does.
    """

    first: Mapping[int, int]
    others: Mapping[int, int]
    split: tuple[int, ...]
    several: bool
    stdin: int | None = None

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """See `Record`; the keys of an object in JSON are text."""
        tables = {key: {int(rank): it for rank, it in stored[key].items()} for key in ("first", "others")}
        return super().from_json({**stored, **tables})

    def of(self, rank: int, local_rank: int) -> int:
        """The streams of a rank."""
        return (self.others if rank else self.first).get(local_rank, 0)


@dataclass(frozen=True, repr=False, eq=False)
class Brought(Record):
    """What comes with the request of a job that resumes one from elsewhere, but for the code."""

    # where the checkpoint goes: into the "run" directory or another "folder"; "" if it comes with the code, or there is
    # none
    into: str = ""
    path: str = ""  # of that folder: relative to the run directory; or absolute, or relative to where the ranks start
    # the volume in which it is instead, and its path there; None if it is in none
    volume: tuple[str, str] | None = None
    ids: Mapping[str, str] = field(default_factory=dict)  # of the checkpoints, by the number of the script's run
    saved: CheckpointRecord | None = None  # the step that was saved last, and its folder; None if none was
    # bytes of the checkpoint's archive; 0 if the checkpoint is there already or goes to another node
    bytes: int = 0

    def folder(self, run: Path, work: Path, data: Sequence[DataRecord]) -> Path:
        """Where the checkpoint goes."""
        for source in data if self.volume is not None else ():
            if self.volume is not None and source["volume"] == self.volume[0]:
                return Path(source["path"], self.volume[1])
        return Path(run if self.into == "run" else work, os.path.expanduser(self.path))


@dataclass(frozen=True, repr=False, eq=False)
class Order(Circumstances):
    """What a client asks a machine to make: its part of a job."""

    parts: ClassVar = {"job": NodeJob, "rank_streams": RankStreams, "brought": Brought}

    job: NodeJob = NodeJob()  # as its user asks for it
    data: tuple[DataRecord, ...] = ()  # its volumes; on the machine, as `machine.volumes.find` describes them
    job_id: str | None = None  # identifier that its nodes share; None makes a new one
    rank_streams: RankStreams | None = None  # what of its output the client shows; None if it shows none
    # the folder of which the code will be a copy, if it is known and on this machine: a plan reads it
    source: str | None = None
    # variables that describe the terminal that shows the ranks
    terminal: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)  # variables that are never shown
    token: str | None = None  # secret with which the nodes authenticate each other
    slots: int = 0  # number of slots of the machine if it has no accelerators
    code: CodeRecord | None = None  # of the job's copy of its code; None if it has none of its own
    bytes: int = 0  # of the archive of the code (tar), which follows
    brought: Brought | None = None  # what the client brings of the job that this one resumes, if that ran elsewhere
    # seconds for which a client that follows the job tries to connect again when its connection has broken
    reconnect: float = 0.0

    def with_job(self, **changes: Any) -> Order:
        """The same with changes of its job."""
        return replace(self, job=replace(self.job, **changes))

    @property
    def resumes(self) -> str | None:
        """The job on this machine whose code and checkpoints this one goes on with."""
        return None if self.brought is not None else self.job.resume_from

    @property
    def split(self) -> tuple[int, ...]:
        """The local ranks whose stderr has a file of its own, as far as the job has them."""
        return self.rank_streams.split if self.rank_streams is not None else ()


@dataclass(frozen=True, repr=False, eq=False)
class StoredJob(Record):
    """What `job.json` holds: a job as its user asked for it, and what is known of it."""

    parts: ClassVar = {"spec": NodeJob}

    spec: NodeJob
    framework: str | None
    created: float  # in seconds since the epoch
    data: tuple[DataRecord, ...] = ()
    code: CodeRecord | None = None  # of its copy of its code


@dataclass(frozen=True, repr=False, eq=False)
class BatchOrder(Record):
    """A part of a job that a scheduler starts, in a file; see `node.host.batch`."""

    parts: ClassVar = {"order": Order}

    order: Order
    root: str  # the folder of this machine's jobs
    # the file of the code's archive (tar, or tar.gz), beside this one; None if the job has no code of its own
    archive: str | None = None
    # the variable in which the scheduler gives the node rank, such as SLURM_NODEID or JOB_COMPLETION_INDEX; None if the
    # job has it, or the nodes agree on it when they connect
    node_rank_variable: str | None = None
    # the variable in which it gives the address at which the others reach this node; None if the agent finds it
    address_variable: str | None = None
    late_nodes: bool = False  # whether the scheduler starts nodes of an elastic job also when it has ended
    ends_with_first: bool = False  # whether it takes the job for ended when node 0 has, and ends the others
    # the folder beside this file into which git has fetched the code; its commit is in the file `commit` there
    cloned: str | None = None
    kept_logs: str | None = None  # the folder in which its logs are kept too, see `node.host.pod.KeptLog`


@dataclass(frozen=True, repr=False, eq=False)
class SlurmOrder(Record):
    """A job for a machine that has sbatch; see `node.host.slurm.place.submit`."""

    parts: ClassVar = {"order": Order}

    order: Order
    target: str  # as its user calls the cluster
    options: SlurmOptions
    tasks: tuple[int, ...] = ()  # the indices of the jobs of an array
    allocation: AllocationRecord | None = None  # that of its user, in which it runs
