"""A job in its run directory: `job.json`, what is known of it, and `spec.json`, this node's part, for its agent."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from paceline.contract.nodejob import NodeJob, Record
from paceline.node.files import read_regular

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.contract.records import CodeRecord, ContainerRecord, DataRecord

SIGNALS, SUSPENDED = "signals", "suspended"  # see `NodeSpec.stop_file`
HOLD = "hold"  # what `SUSPENDED` holds
CURRENT_SECONDS = 5.0  # between two looks of an agent at `NodeSpec.current` and `NodeSpec.stop_file`


@dataclass(frozen=True)
class StoredJob(Record):
    """What `job.json` holds: a job as its user asked for it, and what is known of it."""

    parts: ClassVar = {"spec": NodeJob}

    spec: NodeJob
    framework: str | None
    created: float  # in seconds since the epoch
    data: tuple[DataRecord, ...] = ()
    code: CodeRecord | None = None  # of its copy of its code


@dataclass(frozen=True)
class Program(Record):
    """What each rank runs."""

    # "script" (a Python file run as `python file`), "module" (`python -m name`) or "command" (any executable)
    kind: str
    target: str  # the file, module or executable
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request(Record):
    """What a job requests from its machine's queue for devices (`devicequeue`)."""

    folder: str  # folder of the queue
    need: int | tuple[str, ...]  # how many devices, or which; at least one
    of: tuple[str, ...]  # the machine's devices: its accelerators, or slots "0" … "N-1"
    share: bool = False  # whether other jobs that share may get the same devices
    priority: int = 0  # a waiting job with a higher priority comes first
    slots: bool = False  # whether the devices are slots, not accelerators; then ranks get no variables for them


@dataclass(frozen=True)
class NodeSpec(Record):
    """One node's part of a job."""

    parts: ClassVar = {"program": Program, "request": Request}

    job: str
    job_id: str  # identifies the job; every process of the job has it as PACELINE_JOB_ID
    program: Program  # what each rank runs
    framework: str  # name of the contract that sets the ranks' variables
    nproc: int  # ranks on this node
    python: tuple[str, ...]  # interpreter with its options, as an argument vector
    working_dir: str  # where the ranks start
    # the container in which its agent and ranks run, see `machine.containers.command`; None for none of paceline's
    container: ContainerRecord | None = None
    # the job's volumes that are mounted for its ranks: path, and where they see it
    mounts: tuple[tuple[str, str], ...] = ()
    env: dict[str, str] = field(default_factory=dict)  # variables added to the agent's environment
    setup: tuple[str, ...] = ()  # shell commands that run before the fork server starts, which gets their variables
    preload: tuple[str, ...] = ()  # modules the fork server imports before it forks the first rank
    start_method: str = "fork"  # "fork" from the fork server, or "exec" of a new process
    why_exec: str = ""  # why it is "exec" although the user has not requested it; "" otherwise
    # seconds for which a fork server stays when the job has ended, for the next one; None for none
    keep_warm: float | None = None
    # accelerators of this node that the job may use; None does not change the visibility variables
    devices: tuple[str, ...] | None = None
    # this node's number, or None: the coordinator numbers the nodes in the order in which they join
    node_rank: int | None = 0
    nodes: int = 1  # the largest number of nodes
    least: int = 1  # the smallest number of nodes; if it is less than `nodes`, nodes may join and leave
    expected: int | None = None  # the number of nodes that the first attempt waits for; None for all
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
    hosts: tuple[str, ...] = ()  # names of the nodes in messages, by node rank; empty if unknown
    # where the agents of all nodes listen, by node rank, if another node comes for one that is lost, with its rank and
    # its name; empty if none is replaced
    peers: tuple[str, ...] = ()
    main_address: str | None = None  # where the agents find the first coordinator; None on a single node
    main_port: int | None = None  # its port; on a single node the main port of the ranks; None picks a free one
    local_address: str | None = None  # address at which the other nodes reach this one; None: it is detected
    join_timeout: float = 600.0  # seconds to wait for the other nodes
    last_call: float = 3.0  # seconds to wait for more nodes when there are enough
    silence: float = 10.0  # seconds without a packet after which a node counts as lost; see `rendezvous.silence`
    max_restarts: int = 0  # how many times all ranks may start again after a failure
    grace: float = 30.0  # seconds between SIGTERM and SIGKILL when the job is stopped
    hang_after: float | None = None  # seconds for which ranks stand still until they hang; None does not watch them
    restarts_when_hung: bool = False  # whether a hang is a failure, after which all ranks start again
    split_streams: tuple[int, ...] = ()  # local ranks whose stderr goes to a separate file
    # a local rank, and the file that is its standard input; that of all others is empty
    stdin: tuple[int, str] | None = None
    pass_index: bool = False  # append `--process_index I --process_num N` to the arguments
    # the argument with which each rank gets its local rank, such as `--local_rank`; "" for none
    local_rank_flag: str = ""
    role: str = "default"  # torchrun's role name
    # which cores near its GPU a rank is bound to, see `machine/numa.py`; None binds none
    numa_binding: str | None = None
    virtual_local_rank: bool = False  # each rank sees only its own GPU, and has LOCAL_RANK 0
    run_id: str | None = None  # torchrun's --rdzv-id: identical on all nodes of a job, and on no others
    # seconds after the first start of the ranks at which the job is stopped; None for no limit
    time_limit: float | None = None
    detached: bool = False  # the job outlives the process that started it and its terminal
    # the folder that the job's TensorBoard shows, "" for the run directory; None starts no TensorBoard
    tensorboard: str | None = None
    # the devices to wait for before anything starts; `devices` is what the queue has granted
    request: Request | None = None

    def save(self, path: Path) -> None:
        """Write `spec.json`."""
        path.write_text(json.dumps(self.to_json(), indent=2))

    @classmethod
    def load(cls, path: Path) -> NodeSpec:
        """Read `spec.json`."""
        return cls.from_json(json.loads(read_regular(path)))


def device_of(devices: Sequence[str] | None, local_rank: int) -> str:
    """The accelerator of a rank, of those that its node gives the job; "" if there are none."""
    return devices[local_rank % len(devices)] if devices else ""
