"""Inside a rank: what tells why it is slow, and is cheap to know (`contract/stands.py`)."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    from paceline.contract.stands import Answer

_TIMES = "paceline.train.metrics.step_times"


def evidence(found: Answer, frame: FrameType | None) -> None:
    """Add to an answer what is known of the library's times, of torch, and of what the frames of a thread are at.

    Raises:
        Exception: of any kind, if a version of torch differs; what was found before is in the answer.
    """
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
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__next__" and code.co_filename.endswith("torch/utils/data/dataloader.py"):
            it = frame.f_locals["self"]  # it returns soon: until then, this keeps what it refers to
            found["loader"] = {
                "id": id(it), "workers": it._num_workers, "pinned": it._pin_memory, "done": it._num_yielded,
                "batch": getattr(it._index_sampler, "batch_size", None),
            }  # fmt: skip
            return
        frame = frame.f_back
