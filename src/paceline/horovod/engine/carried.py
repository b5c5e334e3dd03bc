"""Small sums travel with the negotiation: the coordinator adds up, and no collective follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .buffers import bytes_in, bytes_of, divide, scale
from .fusion import dtype_of, size_of
from .negotiation import AVERAGE, SUM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from .entries import Entry
    from .negotiation import Request

_MOST = 256  # bytes; for more, a collective costs less than their text in messages
_TYPES = ("float32", "float64", "int32", "int64")


def fits(request: Request) -> bool:
    """Whether an operation is a sum of one small tensor on the CPU."""
    return (
        request.kind == "allreduce"
        and request.op in (AVERAGE, SUM)
        and request.device == "cpu"
        and len(request.tensors) == 1
        and request.tensors[0][0] in _TYPES
        and 0 < size_of(request) <= _MOST
    )


def packed(entry: Entry) -> str:
    """The tensor of an operation that fits, as text."""
    return _text(bytes_of(entry.inputs))


def added_up(request: Request, parts: Sequence[str]) -> str:
    """The result of an operation, from the tensors of its ranks in their order."""
    dtype = dtype_of(request.tensors[0][0])
    whole, *others = [torch.frombuffer(bytearray.fromhex(part), dtype=dtype) for part in parts]
    for one in (whole, *others):
        scale(one, request.prescale)
    for other in others:
        whole += other
    divide(whole, len(parts) if request.op == AVERAGE else 1)
    scale(whole, request.postscale)
    return _text(bytes_in(whole))


def put(entry: Entry, result: str) -> None:
    """Give an entry its result."""
    assert entry.targets is not None
    (target,) = entry.targets
    with torch.no_grad():
        target.copy_(torch.frombuffer(bytearray.fromhex(result), dtype=target.dtype).view(target.shape))


def _text(data: Tensor) -> str:
    return bytes(data.tolist()).hex()
