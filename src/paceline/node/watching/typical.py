"""What is typical of what a rank waits for, in words: from its stack, its system call and its children."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.contract.stands import Collective, Place, Stand, Thread

_WAITS = "it waits in a collective"
_RUNS = "it waits for an operation of TensorFlow"
_LOADS = "it waits for a worker of a DataLoader"
JOINS = "it waits for other ranks to make a process group"
_HOROVOD = "paceline/horovod/engine/"
_POOL = re.compile(r"multiprocessing/pool\.py")
_CHECKPOINT = re.compile(r"torch/distributed/checkpoint/")
_LIBRARIES = re.compile(r"[\\/]((site|dist)-packages|python3\.\d+|torchinductor_[^\\/]*|[^\\/]*\.pyz)[\\/]|^<")
_OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep

# What a frame of the stack says, the innermost first: file, function, words. The first that fits counts.
_OF_FRAMES = tuple(
    (re.compile(file), re.compile(function), words)
    for file, function, words in (
        (r"torch/utils/data/dataloader\.py", r"_(try_)?get_(data|batch)|_next_data", _LOADS),
        (r"torch/utils/data/_utils/fetch\.py|paceline/train/data/workers\.py", "",
         "it loads the next batch itself"),
        (r"torch/utils/data/_utils/", "", _LOADS),
        (r"paceline/train/data/", "", "it waits for the next batch"),
        (r"distributed_c10d\.py", r"init_process_group|new_group|_new_process_group_helper|_store_based_barrier",
         JOINS),
        (r"torch/distributed/rendezvous\.py", "", JOINS),
        (r"distributed_c10d\.py", "destroy_process_group|_shutdown_backend", "it ends a process group"),
        (r"torch/_(dynamo|inductor)/", "", "it compiles the model"),
        (r"torch/distributed/checkpoint/|torch/serialization\.py", "", "it writes or reads a checkpoint"),
        (r"torch/distributed/", "", _WAITS),
        (r"tensorflow/python/(eager/execute|client/session)\.py", "quick_execute|_call_tf_sessionrun", _RUNS),
        (r"/subprocess\.py", r"_?wait|_?communicate|_try_wait", "it waits for a program that it has started"),
        (r"multiprocessing/(popen_\w+|process)\.py", "wait|poll|join", "it waits for a process that it has started"),
        (r"/(threading|queue)\.py", "_shutdown|_wait_for_tstate_lock", "it waits for a thread to end"),
        (r"/(threading|queue)\.py", "wait|acquire|get|put|__enter__|join", "it waits for a thread, or for a lock"),
        (r"/(ssl|socket|http/client|urllib/request)\.py", "", "it waits for a connection"),
    )
)  # fmt: skip
_OF_CALLS = {
    "futex": "it waits for a lock",
    "nanosleep": "it sleeps",
    "clock_nanosleep": "it sleeps",
    "wait4": "it waits for a program that it has started",
    "waitid": "it waits for a program that it has started",
    "flock": "it waits for the lock of a file",
    "fsync": "it waits for a disk",
    "fdatasync": "it waits for a disk",
    "connect": "it waits for a connection",
    "accept": "it waits for a connection",
    "accept4": "it waits for a connection",
    "recvfrom": "it waits for a connection",
    "recvmsg": "it waits for a connection",
}
_IDLE = 1.0  # second without work: what is written moves before that
ENDED = "it has ended"
_STATES = {"T": "its process is stopped (SIGSTOP)", "t": "a debugger has stopped it", "Z": ENDED}


def why(stand: Stand) -> str:
    """What a rank waits for; "" if nothing that is known."""
    if stand["state"] in _STATES:
        return _STATES[stand["state"]]
    frames = _frames(stand)
    found = next(
        (words for file, _, function in frames for path, name, words in _OF_FRAMES
         if path.search(file) and name.search(function)), "",
    )  # fmt: skip
    if any(_HOROVOD in file for file, _, _ in frames):  # below it are locks
        found = _WAITS
    if "DataLoader" in found:
        return f"{found}{_of_workers(stand)}"
    if "for a thread" in found and any(_POOL.search(file) for file, _, _ in frames):
        return "it waits for the workers of a multiprocessing.Pool; what one had to do that was killed is never done"
    if found in (_WAITS, _RUNS) and (collective := entered(stand)) is not None:
        saves = ", within a distributed checkpoint, which all ranks have to call" if is_in_checkpoint(stand) else ""
        return f"it waits in {described(collective)}{saves}"
    call, file = stand["call"], stand["file"]
    if call == "read" and file.startswith(("/dev/pts", "/dev/tty", "/dev/null", "pipe:")):
        return "it reads its standard input" if _line_has(stand, "input(", "stdin") else f"it waits to read from {file}"
    if call in ("write", "sendto", "sendmsg"):
        reads = ", which nobody reads" if stand["idle"] >= _IDLE else ""
        return f"it waits to write to {file or 'a connection'}{reads}"
    if stand["state"] == "D":
        return "its process waits for a disk or a device (state D)"
    if stand["answer"] is None:
        return _of_silent(stand)
    return found or _OF_CALLS.get(call, "")


def is_in_checkpoint(stand: Stand) -> bool:
    """Whether a rank is in torch.distributed.checkpoint, whose functions are collectives."""
    return any(_CHECKPOINT.search(file) for file, _, _ in _frames(stand))


def place(stand: Stand) -> Place:
    """Where a rank is."""
    threads, frames = _threads(stand), _frames(stand)
    own = next((it for it in frames if it[1] and is_of_user(it[0])), None) or (frames[0] if frames else None)
    where = "" if own is None else f"{os.path.basename(own[0])}:{own[1]} in {own[2].replace('<module>', 'the script')}"
    return {
        "ranks": [stand["rank"]], "hosts": [stand["host"]], "pids": [stand["pid"]],
        "devices": list(filter(None, [stand["device"]])), "where": where, "why": why(stand),
        "stack": frames, "threads": threads[1:],
    }  # fmt: skip


def entered(stand: Stand) -> Collective | None:
    """The collective that a rank is in; None if it is in none, or if that is not known."""
    inside = [it for it in (stand["answer"] or {}).get("collectives", []) if not it["over"]]
    return inside[-1] if inside else None


def described(it: Collective) -> str:
    """`all_reduce 17 (Float [1024])`."""
    inputs = ", ".join(f"{dtype} {shape}" for dtype, shape in zip(it["dtypes"], it["shapes"]))
    return f"{it['kind']} {it['number']}{f' ({inputs})' if inputs else ''}"


def is_asleep(stand: Stand) -> bool:
    """Whether a rank sleeps for a time that the script has set."""
    return stand["call"] in ("nanosleep", "clock_nanosleep")


def _of_workers(stand: Stand) -> str:
    states = [state for state, _ in stand["children"]]
    dead, stopped = states.count("Z"), states.count("T")
    if dead or not states:
        return "; there is none left" if not states or dead == len(states) else f"; {dead} of {len(states)} have ended"
    return (
        f"; {stopped} of {len(states)} are stopped (SIGSTOP)"
        if stopped
        else f"; {len(states)} are there, and do nothing"
    )


def _threads(stand: Stand) -> list[Thread]:
    return (stand["answer"] or {}).get("threads") or stand["seen"]


def _frames(stand: Stand) -> list[tuple[str, int, str]]:
    threads = _threads(stand)
    return threads[0]["frames"] if threads else []


def _of_silent(stand: Stand) -> str:
    """What is known of a rank that does not answer."""
    native = [(file, function) for file, line, function in _frames(stand) if not line]
    if native:
        return f"C code holds the interpreter's lock, in {native[0][1]} of {os.path.basename(native[0][0])}"
    if stand["unseen"] == ENDED:
        return ENDED
    more = f"; {stand['unseen']}" if stand["unseen"] else ""
    return f"it does not answer; C code may hold the interpreter's lock, or the program is not Python's{more}"


def is_of_user(file: str) -> bool:
    """Whether a file is part of the user's script, and of no library."""
    return not _LIBRARIES.search(file) and not file.startswith((_OWN, _STANDARD))


def _line_has(stand: Stand, *words: str) -> bool:
    """Whether the innermost line of the script has one of these words."""
    import linecache

    frames = _frames(stand)
    line = linecache.getline(frames[0][0], frames[0][1]) if frames else ""
    return stand["file"].startswith(("/dev/pts", "/dev/tty")) or any(word in line for word in words)
