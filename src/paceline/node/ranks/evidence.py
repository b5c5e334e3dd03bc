"""Inside a rank: what tells why it is slow, and is cheap to know (`contract/stands.py`)."""

from __future__ import annotations

import itertools
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    from paceline.contract.stands import Answer, Ddp, Loader

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
