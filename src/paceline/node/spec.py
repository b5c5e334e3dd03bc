"""The part of a job that runs on one node, for its agent; stored as `spec.json` in the run directory."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from paceline.contract.nodejob import Circumstances, Record, Running
from paceline.node.files import read_regular

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.contract.records import ContainerRecord

SIGNALS, SUSPENDED = "signals", "suspended"  # see `Circumstances.stop_file`
HOLD = "hold"  # what `SUSPENDED` holds
CURRENT_SECONDS = 5.0  # between two looks of an agent at `NodeSpec.current` and `NodeSpec.stop_file`


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
class NodeSpec(Running, Circumstances):
    """One node's part of a job."""

    parts: ClassVar = {"program": Program, "request": Request}

    job: str = ""
    job_id: str = ""  # identifies the job; every process of the job has it as PACELINE_JOB_ID
    program: Program = Program("command", "")  # what each rank runs
    framework: str = "torch"  # name of the contract that sets the ranks' variables
    nproc: int = 1  # ranks on this node
    python: tuple[str, ...] = ()  # interpreter with its options, as an argument vector
    working_dir: str = "."  # where the ranks start
    # the container in which its agent and ranks run, see `machine.containers.command`; None for none of paceline's
    container: ContainerRecord | None = None
    # the job's volumes that are mounted for its ranks: path, and where they see it
    mounts: tuple[tuple[str, str], ...] = ()
    env: dict[str, str] = field(default_factory=dict)  # variables added to the agent's environment
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
    hang_after: float | None = None  # seconds for which ranks stand still until they hang; None does not watch them
    restarts_when_hung: bool = False  # whether a hang is a failure, after which all ranks start again
    split_streams: tuple[int, ...] = ()  # local ranks whose stderr goes to a separate file
    # the argument with which each rank gets its local rank, such as `--local_rank`; "" for none
    local_rank_flag: str = ""
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
