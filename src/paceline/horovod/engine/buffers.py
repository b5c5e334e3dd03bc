"""Memory for fused tensors, and what is done with the numbers and bytes in it."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_GRAIN = 1 << 20  # bytes of which the memory of buffers is a multiple: those of a step differ a little from the last


class Buffers:
    """Memory for fused tensors that is used again: new memory costs a page fault for every 4 KiB."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._free: list[Tensor] = []  # the one given back last is the last

    def take(self, dtype: torch.dtype, size: int) -> Tensor:
        """A buffer of one dimension, with any contents."""
        needed = size * dtype.itemsize
        with self._lock:
            fitting = [index for index, free in enumerate(self._free) if free.nbytes >= needed]
            chosen = min(fitting, key=lambda index: self._free[index].nbytes, default=None)
            whole = None if chosen is None else self._free.pop(chosen)
        if whole is None:
            whole = torch.empty(-(-needed // _GRAIN) * _GRAIN, dtype=torch.uint8)
        return whole[:needed].view(dtype)

    def give_back(self, buffer: Tensor) -> None:
        whole = torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage())
        with self._lock:
            self._free.append(whole)
            kept = sum(one.nbytes for one in self._free)
            while kept > self._most:
                kept -= self._free.pop(0).nbytes


def scale(buffer: Tensor, factor: float) -> None:
    """Multiply in place. Integers are multiplied as numbers of double precision, and cut off."""
    if factor == 1.0 or buffer.dtype == torch.bool:
        return
    if buffer.is_floating_point() or buffer.is_complex():
        buffer.mul_(factor)
    else:
        buffer.copy_(buffer.double().mul_(factor).trunc_())


def divide(buffer: Tensor, divisor: int) -> None:
    """Divide in place; the mean of integers is cut off towards zero."""
    if buffer.dtype == torch.bool or divisor == 1:
        return
    if buffer.is_floating_point() or buffer.is_complex():
        buffer.div_(divisor)
    else:
        buffer.div_(divisor, rounding_mode="trunc")


def _parts(buffer: Tensor, targets: list[Tensor]) -> list[Tensor]:
    """The parts of a buffer, in the shapes of the tensors that they belong to."""
    parts = torch.split(buffer, [target.numel() for target in targets])
    return [part.view(target.shape) for part, target in zip(parts, targets, strict=True)]


def copy_out(buffer: Tensor, targets: list[Tensor]) -> None:
    """Copy the parts of a buffer to the tensors that they belong to."""
    torch._foreach_copy_(targets, _parts(buffer, targets))


def divide_out(buffer: Tensor, targets: list[Tensor], divisor: int) -> None:
    """Divide the parts of a buffer into the tensors that they belong to, in one pass over the memory."""
    for target, part in zip(targets, _parts(buffer, targets), strict=True):
        if target.dtype == part.dtype:
            torch.div(part, divisor, out=target)
        else:
            target.copy_(part / divisor)


def bytes_in(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, shared with it."""
    return tensor.view(-1).view(torch.uint8)


def bytes_of(tensors: list[Tensor]) -> Tensor:
    """The bytes of tensors, one after the other: shared with a single contiguous one."""
    parts = [bytes_in(tensor.contiguous()) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
