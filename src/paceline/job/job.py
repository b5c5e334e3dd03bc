"""A job as the verbs show it, the same for every backend."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from .quantities import show_time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.contract.records import (
        Cause,
        CheckpointRecord,
        CodeRecord,
        DataRecord,
        FaultRecord,
        GpuRecord,
        GpuUseRecord,
        InstanceRecord,
        JobRecord,
        ProgressRecord,
        TracebackRecord,
        Value,
    )

STATES = ("PENDING", "STARTING", "RUNNING", "RESTARTING", "SUSPENDED", "SUCCEEDED", "FAILED", "STOPPED", "LOST")
SILENT = "does not answer"  # the state of a machine
ELSEWHERE = ("external_id", "url", "logs", "kind", "allocated")  # fields of a job that records lack
FINAL = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
_TIMES = ("created", "started", "finished", "kept_since")


@dataclass(frozen=True)
class Instance:
    """A rank of a job, named `<job>-master-0` or `<job>-worker-<n>`."""

    name: str
    node: str
    rank: int
    state: str
    pid: int | None = None
    exit_code: int | None = None

    @classmethod
    def from_record(cls, record: InstanceRecord) -> Instance:
        """Make it of its record."""
        instance = object.__new__(cls)
        vars(instance).update(record)
        return instance


@dataclass(frozen=True)
class Job:
    """The state of a job. Times are seconds since the epoch.

    Attributes:
        name: unique on its backend.
        state: one of `STATES`.
        backend: where it runs.
        framework: that it trains with; None where that is not known.
        nodes: how many nodes it has.
        ranks: how many ranks it has, on all nodes together.
        attempt: the number of the last attempt, from 0.
        exit_code: that of the first rank that failed, 128 + n for signal n; None until the job ends.
        created: when it was submitted.
        started: when its first attempt began; what its ranks import counts, what it waited for does not.
        finished: when it ended.
        instances: its ranks.
        error: why it failed, in one line.
        cause: the kind of failure, such as `exception`, `out of memory` or `node lost`, for programs that decide by it.
        advice: what to do about the error, if its message is a usual one.
        fault: what kind of fault it is then, and what it is about: `{"kind", "about"}`.
        traceback: the last lines of that of the rank that failed first: `{"rank", "text"}`; jobs in a list may lack it.
        waiting: what it waits for, in one line.
        restarts: how many attempts were restarts after a failure.
        max_restarts: how many such restarts it may have.
        devices: names of the accelerators it was given, where they have names.
        devices_asked: how many it asked for, or which.
        resume_from: the job with whose checkpoints it goes on.
        priority: a waiting job with a higher one starts first.
        queue: the backend's queue.
        image: of the containers that it runs in.
        labels: the user's.
        options: those of its backend that are its own, and not the target's.
        ttl: seconds for which it is kept after its end; None to keep it until it is pruned.
        kept_since: when the ttl began; later than `finished` if its end was noticed later.
        grace: seconds that its ranks have to end when it is stopped.
        command: what each rank runs, with arguments.
        working_dir: where the ranks start.
        folder: its run directory.
        code: where its code was copied to, and from where.
        data: volumes and where they are.
        tensorboard: address of its TensorBoard.
        environment: where its packages come from, as `--environment` named it.
        progress: epoch, step and time left, as the library tells them.
        checkpoint: the step that the library has saved last, and the folder: `{"step", "folder"}`.
        slow: what makes it slow, what helps, and how much that would save: a line each, the worst first.
        external_id: what the system calls it that its backend hands jobs to, such as the number of a Slurm job.
        url: of a page there that shows it.
        logs: where copies of its logs are kept, or that none are; "" where they are in its folder.
        kind: of object that it is there, such as PyTorchJob.
        allocated: how many accelerators it has now, where only their number is known.
        time_limit: seconds from its first start until it is ended, as it was submitted; None without a limit.
        user: who submitted it, by the name on the machine where that was done; None if that is not known.
    """

    name: str
    state: str
    backend: str
    framework: str | None
    nodes: int
    ranks: int
    attempt: int
    exit_code: int | None
    created: float
    started: float | None
    finished: float | None
    instances: tuple[Instance, ...]
    error: str | None
    cause: Cause | None = None
    advice: str | None = None
    fault: FaultRecord | None = None
    traceback: TracebackRecord | None = None
    waiting: str | None = None
    restarts: int = 0
    max_restarts: int = 0
    devices: tuple[str, ...] = ()
    devices_asked: int | tuple[str, ...] | None = None
    resume_from: str | None = None
    priority: int = 0
    queue: str | None = None
    image: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Value] = field(default_factory=dict)
    ttl: float | None = None
    kept_since: float | None = None
    grace: float = 0.0
    command: str = ""
    working_dir: str = ""
    folder: str = ""
    code: CodeRecord | None = None
    data: Sequence[DataRecord] = ()
    tensorboard: str | None = None
    environment: str | None = None
    progress: ProgressRecord | None = None
    checkpoint: CheckpointRecord | None = None
    slow: Sequence[str] = ()
    external_id: str = ""
    url: str = ""
    logs: str = ""
    kind: str = ""
    allocated: int | None = None
    time_limit: float | None = None
    user: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has ended for good."""
        return self.state in FINAL

    def is_recent(self, since: float | None) -> bool:
        """Whether it has not ended, or not before this time; of an end at an unknown time nobody knows that."""
        return not self.is_over or since is None or self.finished is None or self.finished >= since

    def has_expired(self, now: float) -> bool:
        """Whether its time to live is over."""
        return self.is_over and self.ttl is not None and now - (self.kept_since or now) >= self.ttl

    def duration(self, now: float) -> float | None:
        """Seconds from its start to its end, or to `now`; None before it, or if nobody knows whether it runs."""
        if self.started is None or (self.finished is None and (self.is_over or self.state == "LOST")):
            return None
        return (self.finished or now) - self.started

    @classmethod
    def from_record(cls, record: JobRecord) -> Job:
        """Make it of its record, which `node/journal/fold.py` makes for every backend."""
        job = object.__new__(cls)  # several times as fast as calling it, and there may be thousands
        vars(job).update(record, instances=tuple(map(Instance.from_record, record["instances"])))
        return job

    def to_dict(self) -> dict[str, Any]:
        """The stable keys of `-o json`; times are RFC 3339 in UTC."""
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        shown.update((name, show_time(shown[name])) for name in _TIMES)
        if self.progress is not None:
            progress: dict[str, Any] = {**self.progress}
            progress.update((name, show_time(progress[name])) for name in ("time", "began") if name in progress)
            shown["progress"] = progress
        shown["instances"] = [{f.name: getattr(i, f.name) for f in fields(i)} for i in self.instances]
        return shown


def hangs(job: Job) -> bool:
    """Whether none of its ranks goes on: `waiting` says then which of them the others wait for."""
    return job.state == "RUNNING" and (job.waiting or "").startswith("it hangs")


@dataclass(frozen=True)
class Node:
    """A machine that runs jobs. Sizes are in bytes.

    Attributes:
        name: its host name.
        devices: names of its accelerators, or of its slots where it has none; empty if only their number is known.
        allocated: device → the jobs that have it, for these names.
        cores: how many a job may use.
        load: how many are busy.
        memory: its total memory.
        memory_used: how much of it is used.
        disk: size of the file system with the run directories; 0 if that is not known.
        disk_used: how much of it is used.
        gpus: of each GPU `{"index", "uuid", "name", "use", "memory", "memory_used", "temperature", "power"}`, in
            percent, bytes, degrees Celsius and watts; None if the driver does not report it.
        state: whether it takes jobs, where a scheduler says so: ready, or why not.
        partitions: that it belongs to, where there are some.
        address: at which other machines reach it.
        roles: that a cluster gives it, such as control-plane.
        device_count: how many devices it has.
        allocated_count: how many of them jobs have.
        jobs: job → how many devices it has there.
        slots: whether its devices are slots, since it has no accelerators.
        measured: whether the load and the memory in use are measured; else they are what jobs have asked for.
        machine: identifies it until its next start, whatever it is called; "" if that is not known.
    """

    name: str
    devices: tuple[str, ...]
    allocated: Mapping[str, tuple[str, ...]]
    cores: float
    load: float
    memory: int
    memory_used: int
    disk: int
    disk_used: int
    gpus: tuple[GpuRecord, ...] = ()
    state: str = ""
    partitions: tuple[str, ...] = ()
    address: str = ""
    roles: tuple[str, ...] = ()
    device_count: int = 0
    allocated_count: int = 0
    jobs: Mapping[str, int] = field(default_factory=dict)
    slots: bool = False
    measured: bool = True
    machine: str = ""

    def __post_init__(self) -> None:
        if self.devices:  # what the names say is not said twice
            jobs = Counter(job for those in self.allocated.values() for job in those)
            counted = {"device_count": len(self.devices), "allocated_count": len(self.allocated), "jobs": dict(jobs)}
            vars(self).update(counted)


@dataclass(frozen=True)
class Usage:
    """What a job uses now, on all nodes together.

    Attributes:
        processes: how many it has, paceline's own among them.
        cpu: cores that they keep busy.
        memory: bytes; what processes share, such as libraries, counts in none.
        gpus: of each accelerator it uses `{"device", "use", "memory"}`: percentage of time and bytes, None if unknown.
    """

    processes: int
    cpu: float
    memory: int
    gpus: tuple[GpuUseRecord, ...] = ()


@dataclass(frozen=True)
class Contents:
    """What the removal of a job removes.

    Attributes:
        checkpoints: how many.
        size: bytes of all its files, on all its machines together.
    """

    checkpoints: int
    size: int


@dataclass(frozen=True)
class WarmServer:
    """A process that has imported a framework, and starts the next job that fits.

    Attributes:
        machine: where it is.
        key: identifies it there.
        pid: of the process.
        preload: the modules that it has imported.
        python: its interpreter with its options.
        age: seconds since it was started.
        ends_in: seconds until it ends if it starts no job before.
        jobs: how many it has started.
        memory: bytes that it alone uses.
    """

    machine: str
    key: str
    pid: int
    preload: list[str]
    python: list[str]
    age: float
    ends_in: float
    jobs: int
    memory: int


@dataclass(frozen=True)
class Volume:
    """A named path for data on the backend's machines. Sizes are in bytes.

    Attributes:
        name: what jobs call it.
        path: of a folder or file.
        problem: why it cannot be read there; None when it can.
        file: which settings define it.
        size: of its file system.
        free: of it.
        access: how it may be mounted, such as ReadWriteMany, where that is known.
        owner: who made it, where that is known.
        created: when, in seconds since the epoch.
    """

    name: str
    path: str
    problem: str | None = None
    file: str | None = None
    size: int | None = None
    free: int | None = None
    access: tuple[str, ...] = ()
    owner: str | None = None
    created: float | None = None
