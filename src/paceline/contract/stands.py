"""What is known of a rank at one moment. Types, and the protocol between a rank and those who ask it.

A rank listens on an abstract Unix socket. Who connects sends one byte: SHORT for the numbers of its collectives and its
main thread, or WHOLE for all threads and its last collectives too; the answer is one object of JSON, up to the end of
the connection. PROFILE is followed by a line with a `ProfileRequest`; the rank sends an empty line at once, and
`Profiled` when its trace is written. Only processes of the same user are answered.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Sequence

SHORT, WHOLE, PROFILE = b"s", b"w", b"p"
NODE_SIDE = "paceline-node"  # as the first word of a command for `shell`: the node side of paceline, and its role
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Collective(TypedDict):
    """A collective that a rank has entered.

    Attributes:
        group: name of the process group, as torch.distributed gives it.
        number: of the collective in its group, counted from 1.
        kind: `all_reduce`, ….
        shapes: of its inputs.
        dtypes: of its inputs, as torch names them, such as `Float`.
        over: whether it has ended on this rank.
    """

    group: str
    number: int
    kind: str
    shapes: list[list[int]]
    dtypes: list[str]
    over: bool


class Thread(TypedDict):
    """A Python thread: its name, and its frames, the innermost first, each with file, line and function."""

    name: str
    frames: list[tuple[str, int, str]]


class Loader(TypedDict):
    """A torch DataLoader that is being iterated.

    Attributes:
        id: of the iteration, in this process.
        workers: its `num_workers`.
        pinned: whether its batches are in pinned memory.
        batch: samples in a batch; None if that is not known.
        done: batches that this iteration has yielded.
        prefetch: batches that each worker loads ahead; None without workers.
        busy: workers that have a batch to load.
    """

    id: int
    workers: int
    pinned: bool
    batch: int | None
    done: int
    prefetch: int | None
    busy: int


class Ddp(TypedDict):
    """How a DistributedDataParallel exchanges gradients.

    Attributes:
        finds_unused: its `find_unused_parameters`.
        unused: bytes of the parameters that got no gradient.
        buckets: how many there are.
        bytes: of all parameters.
        exposed: seconds of a step in which it exchanges, and does not compute gradients.
    """

    finds_unused: bool
    unused: int
    buckets: int
    bytes: int
    exposed: float


class Answer(TypedDict, total=False):
    """What a rank answers.

    Attributes:
        numbers: of the last collective, by process group.
        sizes: how many ranks each of these groups has.
        framework: whether it has imported a framework.
        alone: if it has not asked which rank it is, the packages in whose world it is alone, such as mpi4py; missing if
            it has asked, imports, or has run programs, which may do the work.
        threads: the main thread first.
        collectives: the last ones of each group, the newest last.
        times: seconds of each part of a step, summed over `steps`, if the script trains with the library.
        loader: that the main thread waits for now.
        computing: threads that torch computes with; given: OMP_NUM_THREADS, if it is a number.
        gpu: whether torch uses one.
        runs: the expression that the innermost frame of the main thread is at, from Python 3.11 on: its first and last
            line, its first byte in the former, and its end in the latter.
        ddp: in whose forward pass the main thread is now.
        single: whether a linear layer there multiplies in float32 on a GPU, without TF32.
    """

    numbers: dict[str, int]
    sizes: dict[str, int]
    framework: bool
    alone: list[str]
    threads: list[Thread]
    collectives: list[Collective]
    times: dict[str, float]
    loader: Loader
    computing: int
    given: int
    gpu: bool
    runs: Sequence[int]
    ddp: Ddp
    single: bool


class MachineNow(TypedDict, total=False):
    """What a machine has done while a rank there stood still.

    Attributes:
        network: bytes per second that it has received and sent.
        gpu_use: the share of the time in which the GPUs of the ranks compute.
        nccl: errors and warnings of NCCL's RAS service that name a rank there, a line each.
    """

    network: float
    gpu_use: float
    nccl: list[str]


class Stand(TypedDict):
    """A rank at one moment.

    Attributes:
        rank, node, host, pid: which.
        answer: its own answer; None if it did not give one in time.
        still: seconds for which it has entered no collective.
        idle: seconds for which neither it nor its children have worked: used a core, read or written.
        state: of its process, a letter of proc(5): R, S, D, T, Z, …; "" if it is gone.
        call: the system call that its main thread waits in, such as `futex`; "" if that is not known.
        file: the file, pipe or terminal on which that call waits; "" if none, or if it is not known.
        children: of each child process the state and the command.
        seen: its threads as seen from outside, if it did not answer; with frames of C code, whose line is 0.
        unseen: why nothing is seen; "" if nothing was tried.
        machine: what is known of its machine.
        device: as its machine numbers it; "" for a rank without one.
    """

    rank: int
    node: int
    host: str
    pid: int
    answer: Answer | None
    still: float
    idle: float
    state: str
    call: str
    file: str
    children: list[tuple[str, str]]
    seen: list[Thread]
    unseen: str
    machine: MachineNow
    device: str


class Place(TypedDict):
    """Ranks that are at the same line.

    Attributes:
        ranks: which.
        hosts: their hosts; pids: their processes; devices: those of ranks that have one.
        where: `train.py:55 in main`; "" if it is not known.
        why: what is typical of what they wait for, in words; "" if nothing is.
        stack: of the main thread, the innermost frame first.
        threads: the other threads of the first of them.
    """

    ranks: list[int]
    hosts: list[str]
    pids: list[int]
    devices: list[str]
    where: str
    why: str
    stack: list[tuple[str, int, str]]
    threads: list[Thread]


Kind = Literal["late", "mismatch", "together", "idle"]


class Hang(TypedDict):
    """Why ranks cannot go on.

    Attributes:
        kind: `late`: some have not entered a collective that others wait in; `mismatch`: they have entered different
            ones; `together`: all wait in the same one; `idle`: no rank works, and none waits for another one.
        ranks: those that keep the others waiting.
        waiting: those that wait for them.
        seconds: for how long nothing has moved.
        collective: that they wait in; None if there is none.
        line: all that in one line.
        places: of all ranks, those of `ranks` first; if no rank works, those that are elsewhere than most.
    """

    kind: Kind
    ranks: list[int]
    waiting: list[int]
    seconds: float
    collective: Collective | None
    line: str
    places: Sequence[Place]


class Busiest(TypedDict):
    """The rank of a node that waits least for other ranks.

    Attributes:
        rank: which.
        exchange: its share of the time in collectives.
        others: the same of the other ranks here, on average.
        part: of a step, that it is in more often than they are.
        line: of the script, where it is then.
    """

    rank: int
    exchange: float
    others: float
    part: str
    line: str


class Pace(Busiest):
    """How much the ranks of a node wait for others, to be compared with other nodes; `others` are all ranks there.

    Attributes:
        host: of the node; ranks: how many are there.
        is_named: whether what makes the node slow names the rank already.
        seen: on the machine, what may slow a rank down; else where to look.
    """

    host: str
    ranks: int
    is_named: bool
    seen: str


class Spent(TypedDict, total=False):
    """What the ranks of a node have spent their time on. What is not known is missing, but for the first four.

    Attributes:
        host: that they run on.
        samples: how many there are.
        parts: the share of each part of a step, the largest first.
        lines: of each part the line of the script that it was at most often.
        still: of each part in how much of it the main thread has waited in the kernel.
        seconds: of each part of a step, as the library has measured them, and in `total` of the whole.
        step: seconds from one batch to the next.
        loader: the DataLoader that was waited for last.
        read: bytes that a rank has read for each batch; reads: in how many calls.
        ranks: how many run here.
        cores: that they may use; used: how many of them they and their children have kept busy; free: how many nobody.
        queued: the share of the time in which main threads were ready, and waited for a core.
        computing, gpu, ddp, single: see `Answer`.
        busy: the share of the workers that had a batch to load while the main thread waited for them.
        iterations: over batches, of all ranks.
        collectives: of a rank per second; by_hand: the share of the time in those that the script calls itself;
            objects: in those of Python objects.
        late: the share of the last quarter of the samples in which data is waited for.
        threads_at: the line of the script that gives torch other threads than OMP_NUM_THREADS; missing if none does.
        pace: the rank that waits least for others; its `others` are all ranks here.
        busiest: the same, if it keeps the others here waiting.
        rate: bytes per second that processes which load have read here.
        local: the same of the local temporary folder.
        gpu_use: the share of the time in which the GPUs of the ranks compute; gpu_memory: of their memory that is used;
            hottest: degrees Celsius of one.
        world: ranks of the largest process group.
        sent: bytes per second that this machine sends; infiniband: those of them over InfiniBand, if it has that; link:
            what its fastest network interface can send.
        swapped: bytes per second to and from the swap space; stalled: the share of the time in which processes of this
            machine wait for memory.
        slowed: how often heat has slowed its cores down.
    """

    host: str
    samples: int
    parts: dict[str, float]
    lines: dict[str, str]
    still: dict[str, float]
    seconds: dict[str, float]
    step: float
    loader: Loader
    read: float
    reads: float
    ranks: int
    cores: int
    used: float
    free: float
    queued: float
    computing: int
    gpu: bool
    ddp: Ddp
    single: bool
    busy: float
    iterations: int
    collectives: float
    by_hand: float
    objects: float
    late: float
    threads_at: str
    pace: Busiest
    busiest: Busiest
    rate: float
    local: float
    gpu_use: float
    gpu_memory: float
    hottest: float
    world: int
    sent: float
    infiniband: float
    link: float
    swapped: float
    stalled: float
    slowed: int


class ProfileRequest(TypedDict):
    """What torch.profiler is to record in a rank.

    Attributes:
        steps: of an optimizer.
        seconds: after which it ends with the next step, or, if no optimizer has stepped, begins without one.
        path: of the trace, a file that is made.
    """

    steps: int
    seconds: float
    path: str


class Profiled(TypedDict, total=False):
    """What a rank says of its profile.

    Attributes:
        error: why there is none; then there are no others.
        host, pid: of the rank.
        thread: the identifier of the thread that trains, in the trace; 0 if no optimizer has stepped.
        times: ends of steps, in nanoseconds since the epoch; the first is the beginning.
        why: why there are fewer steps than were asked for; "" if there are not.
    """

    error: str
    host: str
    pid: int
    thread: int
    times: list[int]
    why: str


def address(job_id: str, attempt: int, rank: int) -> str:
    """Of a rank's socket."""
    return f"\0paceline-{job_id}-{attempt}-{rank}"


def is_of_this_user(peer: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user, or to root."""
    _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return uid in (0, os.geteuid())
