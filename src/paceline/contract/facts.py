"""What machines say of themselves before a job starts there, and when they are checked.

Types alone: nothing imports this at run time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional, TypedDict, final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import NotRequired

# -- what is there: for each key see the class of `node.machine` or `contract.memory` ----------------------------------

PythonFacts = TypedDict("PythonFacts", {"version": str, "executable": str, "environment": Optional[str]})
PackageFacts = TypedDict("PackageFacts", {"version": Optional[str], "build": Optional[str]})
GpuFacts = TypedDict("GpuFacts", {"index": int, "name": str, "memory": Optional[int], "used": Optional[int]})
CoresFacts = TypedDict("CoresFacts", {"present": int, "usable": int, "quota": Optional[float]})
MemoryFacts = TypedDict("MemoryFacts", {"total": int, "available": int, "limit": Optional[int]})


class GpusFacts(TypedDict):
    nvidia: Sequence[GpuFacts]
    amd: Sequence[GpuFacts]
    driver: str | None
    nvidia_on_bus: int
    visible: Mapping[str, str] | None
    problem: str | None


class DiskFacts(TypedDict, total=False):  # of one that does not answer, the path alone
    path: str
    exists: bool
    writable: bool
    total: int
    free: int
    free_files: int | None


class Software(TypedDict, total=False):
    python: PythonFacts
    packages: dict[str, PackageFacts | None]  # the frameworks that are looked for; None if it is not installed
    imports: dict[str, str]  # what the job's script imports, with the versions
    refused: str  # why the job cannot run here


class MachineFacts(TypedDict, total=False):
    devices: GpusFacts
    cores: CoresFacts
    memory: MemoryFacts


class ForJob(TypedDict, total=False):
    names: list[str]  # of jobs, that are taken
    free: int  # devices that no job holds
    address: str  # at which other hosts reach it
    machine: str  # identifies it
    port: int  # for the job's nodes


class PreflightFacts(Software, MachineFacts, ForJob, total=False):
    """The first answer to a `Preflight`; without a job it has no `ForJob`, with one no `MachineFacts`."""

    disks: list[DiskFacts]
    environment: EnvironmentFacts | ImageFacts
    has_checkpoint: bool
    notes: list[str]
    listens: int  # the port for the other hosts


# -- environments and images -------------------------------------------------------------------------------------------


class BuiltEnvironment(TypedDict):
    """The record of an environment that is whole."""

    digest: str
    source: str  # as the user calls it
    minor: str  # of its Python
    seconds: float  # that it took
    bytes: int
    packages: dict[str, str]  # name → version
    built: float  # in seconds since the epoch
    python: NotRequired[str]  # its interpreter


@final
class EnvironmentFacts(TypedDict):
    """What a machine has for an environment."""

    pythons: list[tuple[str, str]]  # interpreters, each with its minor version
    built: dict[str, BuiltEnvironment]  # interpreter → the environment for it, if it is there
    platform: dict[str, str]  # as wheels name it, and the `version` of the first interpreter
    uv: str | None  # the program, and that of conda; None if there is none
    conda: str | None
    free: int  # bytes where environments are, and whether programs may not run there
    is_noexec: bool
    place: str
    has_index: bool | None  # whether it reaches one; None if the environment is there
    now: float  # seconds since the epoch, by its clock


class EnvironmentEntry(TypedDict):
    name: str
    source: str | None  # None if it is half of one
    bytes: int
    used: float  # in seconds since the epoch


@final
class ImageFacts(TypedDict, total=False):
    """What would run an image on a machine; `problem` is why nothing can."""

    program: str
    reference: str  # as the program calls it
    is_there: bool
    source: str  # from where apptainer gets it
    problem: str


# -- routes ------------------------------------------------------------------------------------------------------------


class RouteFacts(TypedDict, total=False):
    problem: str | None  # why it does not work
    seconds: float  # of a round trip
    bandwidth: float  # bytes per second
    untried: str  # why it was not tried
    address: str


# -- a cluster with Slurm ----------------------------------------------------------------------------------------------


MungeFacts = TypedDict("MungeFacts", {"socket": Optional[str], "problem": "NotRequired[str]"})
ControllerFacts = TypedDict("ControllerFacts", {"up": str, "problem": Optional[str]})
AccountingFacts = TypedDict("AccountingFacts", {"on": bool, "problem": Optional[str]})
# How many GPUs a node has at most, and how many the short job asks for.
ShortJobGpus = TypedDict("ShortJobGpus", {"most": int, "asked": int})


class PartitionFacts(TypedDict):
    name: str
    is_default: bool
    state: str
    limit: str
    up: int  # nodes
    total: int


class ChosenPartition(TypedDict):
    given: str  # as the target says; "" if it says nothing
    names: list[str]
    unknown: list[str]  # those of them that do not exist
    up: int  # most nodes of one of them


class NodeFacts(Software):
    """What a node says that runs the short job."""

    name: str
    devices: GpusFacts
    granted: int  # GPUs that it got
    addresses: list[str]
    port: int  # where it listens for the others


class NodeRoutes(TypedDict):
    """The routes from a node."""

    name: str
    names: dict[str, str | None]  # of all nodes; None, or why it has no address
    routes: dict[str, RouteFacts]


class ShortJob(TypedDict, total=False):
    """What is found out by a short job; what did not happen is missing."""

    nodes: int
    partition: str
    limit: float  # seconds
    gpus: ShortJobGpus
    id: str
    state: str  # as squeue says, and the nodes
    nodelist: str
    waiting: str  # why it waits
    took: float  # seconds until a node has written something
    late: float  # seconds in which it did not start
    endless: float  # seconds in which it did not end
    ended: str  # how, if its nodes have not written all
    comment: str  # what nodes say that do not see the folder
    facts: list[NodeFacts]
    routes: list[NodeRoutes]
    problem: str  # why it could not be tried
    uncancelled: str | None  # why it could not be cancelled


class SlurmFacts(TypedDict, total=False):
    """What `SlurmCheck` finds out, as far as it was tried."""

    root: str
    python: str
    commands: dict[str, bool]  # whether they are there
    version: str
    munge: MungeFacts
    controller: ControllerFacts
    config: dict[str, str | None]
    accounting: AccountingFacts
    partitions: list[PartitionFacts]
    partition: ChosenPartition
    job: ShortJob
    untried: str  # why no more was tried
