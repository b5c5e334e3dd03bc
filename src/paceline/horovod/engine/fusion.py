"""Which of the ready operations are done together, as one collective."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from .negotiation import Request, Response

# A tensor of this size is not copied into a buffer with others: the copy costs more than a collective of its own.
ALONE = 8 << 20
_FUSED = ("allreduce", "reducescatter", "allgather", "broadcast")


def dtype_of(name: str) -> torch.dtype:
    """The type that a request names."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def size_of(request: Request) -> int:
    """Bytes of a request's tensors."""
    return sum(math.prod(shape) * dtype_of(dtype).itemsize for dtype, shape in request.tensors)


def batches(responses: Iterable[Response], threshold: int) -> list[list[Response]]:
    """Group responses into batches: alike ones together, up to `threshold` bytes. All ranks group them alike.

    Responses without a collective (errors, barriers) come alone.
    """
    made: list[list[Response]] = []
    open_batches: dict[Hashable, tuple[list[Response], int]] = {}
    for response in responses:
        request = response.request
        size = size_of(request)
        if response.error or request.kind not in _FUSED or size >= ALONE or size > threshold:
            made.append([response])
            continue
        alike = _likeness(request)
        filled, total = open_batches.get(alike, ([], 0))
        if not filled or total + size > threshold:
            filled, total = [], 0
            made.append(filled)
        filled.append(response)
        open_batches[alike] = filled, total + size
    return made


def _likeness(request: Request) -> Hashable:
    """What operations must have in common to be done as one."""
    common = (request.process_set, request.kind, request.device)
    if request.kind == "broadcast":
        return (*common, request.root)
    if request.kind == "allgather":
        return common
    kinds = {dtype for dtype, _ in request.tensors}
    if len(kinds) != 1:
        return (*common, request.name)  # a group of several types: alone
    return (*common, request.op, request.prescale, request.postscale, *kinds)
