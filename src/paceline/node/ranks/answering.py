"""Inside a rank: a thread that says where the rank is, to whom asks (`contract/stands.py`). It sleeps meanwhile.

It works as long as the main thread releases the interpreter's lock, as all that waits in a framework does.
"""

from __future__ import annotations

import _thread
import contextlib
import itertools
import json
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

from paceline.contract.stands import PROFILE, WHOLE, address, is_of_this_user
from paceline.node.watching.typical import described

from . import joining, profiling

if TYPE_CHECKING:
    from types import FrameType

    from paceline.contract.stands import Answer, Collective, Ddp, Loader, Thread

_FRAMEWORKS = ("torch", "tensorflow", "jax", "paddle", "mpi4py")
_PROGRAM = os.path.join(os.path.dirname(__file__), "program.py")
_MOST_FRAMES, _MOST_COLLECTIVES = 60, 5
_HOROVOD = "paceline.horovod.common.process"
_OVER = "last_completed_collective"


def listen() -> None:
    """Start the thread, if this process is a rank of a job that is watched."""
    asked = [os.environ.get(name) for name in ("PACELINE_JOB_ID", "PACELINE_ATTEMPT", "PACELINE_RANK")]
    if os.environ.get("PACELINE_HANG_AFTER") is None or None in asked:
        return
    job_id, attempt, rank = map(str, asked)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address(job_id, int(attempt), int(rank)))
        listener.listen(8)
    except OSError:  # without it the rank is watched from outside
        listener.close()
        return
    os.register_at_fork(after_in_child=listener.close)
    begun = _thread.allocate_lock()
    begun.acquire()
    _thread.start_new_thread(_serve, (listener, threading.get_ident(), begun))  # none that a script would see or join
    begun.acquire()  # a thread that begins while Python ends would crash the rank


def _serve(listener: socket.socket, main: int, begun: _thread.LockType) -> None:
    begun.release()
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # the script has closed all descriptors
            return
        with connection, contextlib.suppress(Exception):  # whatever a script has done to its modules
            if is_of_this_user(connection):
                connection.settimeout(1.0)
                what = connection.recv(1)
                if what == PROFILE:
                    profiling.begin(connection.dup())
                else:
                    connection.sendall(json.dumps(_answer(main, whole=what == WHOLE)).encode())


def _answer(main: int, *, whole: bool) -> Answer:
    found: Answer = {
        "numbers": {}, "sizes": {}, "framework": any(name in sys.modules for name in _FRAMEWORKS)
    }  # fmt: skip
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    world: Any = getattr(c10d, "_world", None)
    for group in list(world.pg_map) if world is not None else ():
        name = str(world.pg_names.get(group, ""))
        with contextlib.suppress(RuntimeError):  # a backend that does not count
            found["numbers"][name] = group._get_sequence_number_for_group()
            found["sizes"][name] = group.size()
    found["threads"] = _threads(main)[: None if whole else 1]
    frames = [frame for thread in found["threads"][:1] for frame in thread["frames"]]
    if not any(file.startswith("<frozen importlib") for file, _, _ in frames) and joining.is_alone():
        found["alone"] = joining.worlds()
    with contextlib.suppress(Exception):  # most of it is no public interface
        evidence(found, sys._current_frames().get(main))
    if whole:
        found["collectives"] = []
        if c10d is not None:
            with contextlib.suppress(Exception):  # it is no public interface
                found["collectives"] = _collectives()
    if (horovod := sys.modules.get(_HOROVOD)) is not None:
        with contextlib.suppress(Exception):  # it may change meanwhile
            horovod.tell(found)
    return found


def _threads(main: int) -> list[Thread]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    order = sorted(frames, key=lambda ident: (ident != main, ident))
    return [{"name": names.get(ident, f"{ident}"), "frames": _frames(frames[ident])} for ident in order]


def _frames(frame: FrameType | None) -> list[tuple[str, int, str]]:
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        code = frame.f_code
        if code.co_filename == _PROGRAM:  # what is below has started the script
            break
        found.append((code.co_filename, frame.f_lineno or code.co_firstlineno, code.co_name))
        frame = frame.f_back
    return found


def last_collectives() -> str:
    """The last collective of each group, in words; "" if there is none."""
    last = {one["group"]: one for one in _collectives()} if "torch.distributed.distributed_c10d" in sys.modules else {}
    return ", ".join(f"{described(one)}{'' if one['over'] else ', which had not ended'}" for one in last.values())


def _collectives() -> list[Collective]:
    """The last collectives of each group, from torch's flight recorder."""
    record = json.loads(sys.modules["torch"]._C._distributed_c10d._dump_fr_trace_json())
    over = {group: int(status[_OVER]) for group, status in record.get("pg_status", {}).items()}
    found: dict[str, list[Collective]] = {}
    for entry in record.get("entries", ()):
        if entry["is_p2p"]:
            continue
        group, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
        kind = str(entry["profiling_name"]).rpartition(":")[2]
        found.setdefault(group, []).append({
            "group": group, "number": number, "kind": kind, "shapes": entry["input_sizes"],
            "dtypes": entry["input_dtypes"], "over": number <= over.get(str(entry["pg_id"]), -1),
        })  # fmt: skip
    return [one for ones in found.values() for one in ones[-_MOST_COLLECTIVES:]]


# -- what tells why a rank is slow, and is cheap to know ---------------------------------------------------------------

_TIMES = "paceline.train.metrics.step_times"
_WITH_TENSOR_CORES = 7  # compute capability, from which on GPUs have them


def evidence(found: Answer, frame: FrameType | None) -> None:
    """Add to an answer what is known of the library's times, of torch, and of what the frames of a thread are at."""
    if frame is not None and sys.version_info >= (3, 11):
        span = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
        if None not in span:
            found["runs"] = span
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    if totals := getattr(sys.modules.get(_TIMES), "TOTALS", None):
        found["times"] = dict(totals)
    found["computing"], found["gpu"] = torch.get_num_threads(), torch.cuda.is_initialized()
    if (given := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        found["given"] = int(given)
    while frame is not None:
        code = frame.f_code
        name, file = code.co_name, code.co_filename
        # A frame that is read keeps what its locals refer to, until it returns: that is soon.
        if name == "__next__" and file.endswith("torch/utils/data/dataloader.py"):
            found["loader"] = _loader(frame.f_locals["self"])
            return
        if name == "forward" and file.endswith("torch/nn/modules/linear.py") and found["gpu"]:
            found["single"] = (
                frame.f_locals["input"].dtype == torch.float32
                and torch.get_float32_matmul_precision() == "highest"
                and torch.cuda.get_device_capability()[0] >= _WITH_TENSOR_CORES
            )
        # Elsewhere the main thread may hold the lock of what is read while it waits for other ranks, perhaps for ever.
        if name == "_run_ddp_forward" and file.endswith("torch/nn/parallel/distributed.py"):
            found["ddp"] = _ddp(frame.f_locals["self"]._get_ddp_logging_data())
            return
        frame = frame.f_back


def _loader(it: Any) -> Loader:
    waiting = [task for task in getattr(it, "_task_info", {}).values() if len(task) == 1]  # for their worker
    return {
        "id": id(it), "workers": it._num_workers, "pinned": it._pin_memory, "done": it._num_yielded,
        "batch": getattr(it._index_sampler, "batch_size", None), "prefetch": getattr(it, "_prefetch_factor", None),
        "busy": len({worker for (worker,) in waiting}),
    }  # fmt: skip


def _ddp(known: dict[str, Any]) -> Ddp:
    """From what DistributedDataParallel notes of itself, in nanoseconds; its times are of the first steps, and of each
    hundredth one later."""
    return {
        "finds_unused": bool(known["find_unused_parameters"]), "unused": known.get("unused_parameter_size", 0),
        "buckets": max(1, known.get("num_buckets_reduced", 1)), "bytes": known["total_parameter_size_bytes"],
        "exposed": (known.get("avg_backward_comm_time", 0) - known.get("avg_backward_compute_comm_overlap_time", 0))
        / 1e9,
    }  # fmt: skip
