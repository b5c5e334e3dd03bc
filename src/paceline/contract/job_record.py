"""The record of a job, which nodes send and clients show. Only types: programs do not import this at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, Union

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

State = Literal["PENDING", "STARTING", "RUNNING", "RESTARTING", "SUCCEEDED", "FAILED", "STOPPED", "LOST"]
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
    priority: int
    queue: str | None
    labels: Mapping[str, str]
    options: Mapping[str, Value]
    ttl: float | None
    grace: float
    command: str
    working_dir: str
    folder: str
    code: Mapping[str, Value] | None
    data: Sequence[Mapping[str, Value]]
    tensorboard: str | None


class JobState(TypedDict):
    """What changes while a job runs; see `paceline.job.job.Job` for each key."""

    state: State
    attempt: int
    exit_code: int | None
    started: float | None
    finished: float | None
    instances: list[InstanceRecord]
    error: str | None
    cause: str | None
    waiting: str | None
    restarts: int
    devices: list[str]
    kept_since: float | None
    progress: Mapping[str, Value] | None
    checkpoint: CheckpointRecord | None


class JobRecord(JobFacts, JobState):
    """All that the verbs show of a job."""
