"""What is known of a rank at one moment. Types, and the protocol between a rank and those who ask it.

A rank listens on an abstract Unix socket. Who connects sends one byte: SHORT for the numbers of its collectives and its
main thread, or WHOLE for all threads and its last collectives too; the answer is one object of JSON, up to the end of
the connection. PROFILE is followed by a line with a `ProfileRequest`; the rank sends an empty line at once, and
`Profiled` when its trace is written. Only processes of the same user are answered.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Literal, TypedDict

from .local_sockets import peer_of

if TYPE_CHECKING:
    from collections.abc import Sequence

SHORT, WHOLE, PROFILE = b"s", b"w", b"p"
NODE_SIDE = "paceline-node"  # as the first word of a command for `shell`: the node side of paceline, and its role


class Collective(TypedDict):
    """A collective that a rank has entered."""

    group: str  # name of the process group, as torch.distributed gives it
    number: int  # of the collective in its group, counted from 1
    kind: str  # `all_reduce`, ….
    shapes: list[list[int]]  # of its inputs
    dtypes: list[str]  # of its inputs, as torch names them, such as `Float`
    over: bool  # whether it has ended on this rank


class Thread(TypedDict):
    """A Python thread: its name, and its frames, the innermost first, each with file, line and function."""

    name: str
    frames: list[tuple[str, int, str]]


class Loader(TypedDict):
    """A torch DataLoader that is being iterated."""

    id: int  # of the iteration, in this process
    workers: int  # its `num_workers`
    pinned: bool  # whether its batches are in pinned memory
    batch: int | None  # samples in a batch; None if that is not known
    done: int  # batches that this iteration has yielded
    prefetch: int | None  # batches that each worker loads ahead; None without workers
    busy: int  # workers that have a batch to load


class Ddp(TypedDict):
    """How a DistributedDataParallel exchanges gradients."""

    finds_unused: bool  # its `find_unused_parameters`
    unused: int  # bytes of the parameters that got no gradient
    buckets: int  # how many there are
    bytes: int  # of all parameters
    exposed: float  # seconds of a step in which it exchanges, and does not compute gradients


class Answer(TypedDict, total=False):
    """What a rank answers."""

    numbers: dict[str, int]  # of the last collective, by process group
    sizes: dict[str, int]  # how many ranks each of these groups has
    framework: bool  # whether it has imported a framework
    # if it has not asked which rank it is, the packages in whose world it is alone, such as mpi4py; missing if it has
    # asked, imports, or has run programs, which may do the work
    alone: list[str]
    threads: list[Thread]  # the main thread first
    collectives: list[Collective]  # the last ones of each group, the newest last
    # seconds of each part of a step, summed over `steps`, if the script trains with the library
    times: dict[str, float]
    loader: Loader  # that the main thread waits for now
    computing: int  # threads that torch computes with; given: OMP_NUM_THREADS, if it is a number
    given: int
    gpu: bool  # whether torch uses one
    # the expression that the innermost frame of the main thread is at, from Python 3.11 on: its first and last line,
    # its first byte in the former, and its end in the latter
    runs: Sequence[int]
    ddp: Ddp  # in whose forward pass the main thread is now
    single: bool  # whether a linear layer there multiplies in float32 on a GPU, without TF32


class MachineNow(TypedDict, total=False):
    """What a machine has done while a rank there stood still."""

    network: float  # bytes per second that it has received and sent
    gpu_use: float  # the share of the time in which the GPUs of the ranks compute
    nccl: list[str]  # errors and warnings of NCCL's RAS service that name a rank there, a line each


class Stand(TypedDict):
    """A rank at one moment."""

    # rank, node, host, pid: which
    rank: int
    node: int
    host: str
    pid: int
    answer: Answer | None  # its own answer; None if it did not give one in time
    still: float  # seconds for which it has entered no collective
    idle: float  # seconds for which neither it nor its children have worked: used a core, read or written
    state: str  # of its process, a letter of proc(5): R, S, D, T, Z, …; "" if it is gone
    call: str  # the system call that its main thread waits in, such as `futex`; "" if that is not known
    file: str  # the file, pipe or terminal on which that call waits; "" if none, or if it is not known
    children: list[tuple[str, str]]  # of each child process the state and the command
    seen: list[Thread]  # its threads as seen from outside, if it did not answer; with frames of C code, whose line is 0
    unseen: str  # why nothing is seen; "" if nothing was tried
    machine: MachineNow  # what is known of its machine
    device: str  # as its machine numbers it; "" for a rank without one


class Place(TypedDict):
    """Ranks that are at the same line."""

    ranks: list[int]  # which
    hosts: list[str]  # their hosts; pids: their processes; devices: those of ranks that have one
    pids: list[int]
    devices: list[str]
    where: str  # `train.py:55 in main`; "" if it is not known
    why: str  # what is typical of what they wait for, in words; "" if nothing is
    stack: list[tuple[str, int, str]]  # of the main thread, the innermost frame first
    threads: list[Thread]  # the other threads of the first of them


Kind = Literal["late", "mismatch", "together", "idle"]


class Hang(TypedDict):
    """Why ranks cannot go on."""

    # `late`: some have not entered a collective that others wait in; `mismatch`: they have entered different ones;
    # `together`: all wait in the same one; `idle`: no rank works, and none waits for another one
    kind: Kind
    ranks: list[int]  # those that keep the others waiting
    waiting: list[int]  # those that wait for them
    seconds: float  # for how long nothing has moved
    collective: Collective | None  # that they wait in; None if there is none
    line: str  # all that in one line
    # of all ranks, those of `ranks` first; if no rank works, those that are elsewhere than most
    places: Sequence[Place]


class Busiest(TypedDict):
    """The rank of a node that waits least for other ranks."""

    rank: int  # which
    exchange: float  # its share of the time in collectives
    others: float  # the same of the other ranks here, on average
    part: str  # of a step, that it is in more often than they are
    line: str  # of the script, where it is then


class Pace(Busiest):
    """How much the ranks of a node wait for others, to be compared with other nodes; `others` are all ranks there."""

    host: str  # of the node; ranks: how many are there
    ranks: int
    is_named: bool  # whether what makes the node slow names the rank already
    seen: str  # on the machine, what may slow a rank down; else where to look


class Spent(TypedDict, total=False):
    """What the ranks of a node have spent their time on. What is not known is missing, but for the first four."""

    host: str  # that they run on
    samples: int  # how many there are
    parts: dict[str, float]  # the share of each part of a step, the largest first
    lines: dict[str, str]  # of each part the line of the script that it was at most often
    still: dict[str, float]  # of each part in how much of it the main thread has waited in the kernel
    seconds: dict[str, float]  # of each part of a step, as the library has measured them, and in `total` of the whole
    step: float  # seconds from one batch to the next
    loader: Loader  # the DataLoader that was waited for last
    read: float  # bytes that a rank has read for each batch; reads: in how many calls
    reads: float
    ranks: int  # how many run here
    # that they may use; used: how many of them they and their children have kept busy; free: how many nobody
    cores: int
    used: float
    free: float
    queued: float  # the share of the time in which main threads were ready, and waited for a core
    # computing, gpu, ddp, single: see `Answer`
    computing: int
    gpu: bool
    ddp: Ddp
    single: bool
    busy: float  # the share of the workers that had a batch to load while the main thread waited for them
    iterations: int  # over batches, of all ranks
    # of a rank per second; by_hand: the share of the time in those that the script calls itself; objects: in those of
    # Python objects
    collectives: float
    by_hand: float
    objects: float
    late: float  # the share of the last quarter of the samples in which data is waited for
    threads_at: str  # the line of the script that gives torch other threads than OMP_NUM_THREADS; missing if none does
    pace: Busiest  # the rank that waits least for others; its `others` are all ranks here
    busiest: Busiest  # the same, if it keeps the others here waiting
    rate: float  # bytes per second that processes which load have read here
    local: float  # the same of the local temporary folder
    # the share of the time in which the GPUs of the ranks compute; gpu_memory: of their memory that is used; hottest:
    # degrees Celsius of one
    gpu_use: float
    gpu_memory: float
    hottest: float
    world: int  # ranks of the largest process group
    # bytes per second that this machine sends; infiniband: those of them over InfiniBand, if it has that; link: what
    # its fastest network interface can send
    sent: float
    infiniband: float
    link: float
    # bytes per second to and from the swap space; stalled: the share of the time in which processes of this machine
    # wait for memory
    swapped: float
    stalled: float
    slowed: int  # how often heat has slowed its cores down


class ProfileRequest(TypedDict):
    """What torch.profiler is to record in a rank."""

    steps: int  # of an optimizer
    seconds: float  # after which it ends with the next step, or, if no optimizer has stepped, begins without one
    path: str  # of the trace, a file that is made


class Profiled(TypedDict, total=False):
    """What a rank says of its profile."""

    error: str  # why there is none; then there are no others
    # host, pid: of the rank
    host: str
    pid: int
    thread: int  # the identifier of the thread that trains, in the trace; 0 if no optimizer has stepped
    times: list[int]  # ends of steps, in nanoseconds since the epoch; the first is the beginning
    why: str  # why there are fewer steps than were asked for; "" if there are not


def address(job_id: str, attempt: int, rank: int) -> str:
    """The abstract address of a rank's local socket."""
    return f"\0paceline-{job_id}-{attempt}-{rank}"


def is_of_this_user(peer: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user, or to root."""
    return peer_of(peer)[1] in (0, os.geteuid())
