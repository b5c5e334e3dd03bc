"""Small sums travel with the negotiation: the coordinator adds up, and no collective follows."""

from __future__ import annotations

import ctypes
from array import array
from typing import TYPE_CHECKING

import torch

from .fusion import size_of
from .negotiation import AVERAGE, SUM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .entries import Entry
    from .negotiation import Request

Numbers = list[float]  # in JSON; of a tensor, in the order of its memory
_MOST = 256  # bytes; for more, a collective costs less than their text in messages
_CODES = {"float32": "f", "float64": "d", "int32": "i", "int64": "q"}  # of `array`
_LIMITS = {"int32": 1 << 31, "int64": 1 << 63}  # at which integers wrap around


def fits(request: Request) -> bool:
    """Whether an operation is a sum of one small tensor on the CPU, without factors: these are of the tensor's type."""
    return (
        request.kind == "allreduce"
        and request.op in (AVERAGE, SUM)
        and request.device == "cpu"
        and len(request.tensors) == 1
        and request.tensors[0][0] in _CODES
        and 0 < size_of(request) <= _MOST
        and request.prescale == request.postscale == 1.0
    )


def packed(entry: Entry) -> Numbers:
    """The tensor of an operation that fits."""
    numbers: Numbers = entry.inputs[0].flatten().tolist()
    return numbers


def added_up(request: Request, parts: Sequence[Numbers]) -> Numbers:
    """The result of an operation, from the tensors of its ranks in their order."""
    count = len(parts) if request.op == AVERAGE else 1
    limit = _LIMITS.get(request.tensors[0][0])
    if limit is not None:
        wrapped = [(sum(column) + limit) % (2 * limit) - limit for column in zip(*parts, strict=True)]
        return [total // count if total >= 0 else -(-total // count) for total in wrapped]
    return [sum(column) / count for column in zip(*parts, strict=True)]


def put(entry: Entry, result: Numbers) -> None:
    """Give an entry its result."""
    assert entry.targets is not None
    (target,) = entry.targets
    made = array(_CODES[entry.request.tensors[0][0]], result)
    if target.is_contiguous():
        ctypes.memmove(target.data_ptr(), made.buffer_info()[0], target.nbytes)
    else:
        target.copy_(torch.frombuffer(made, dtype=target.dtype).view(target.shape))
