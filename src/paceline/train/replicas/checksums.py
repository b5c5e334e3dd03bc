"""Checksums of the bits of tensors, computed on their device with integers, so that no order of sums matters.

A tensor has two: the sum of its words, modulo 2**64, and the sum of these words times weights, which depend on their
places. A changed bit always changes the first one. Words that change places change the second one, unless they move by
a multiple of `COLUMNS` words. A word is an element, or of large tensors 64 bits.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING

import torch

from .judging import COLUMNS, weights

if TYPE_CHECKING:
    from collections.abc import Sequence

_LARGE = 32 * COLUMNS  # bytes; smaller tensors are summed together, which takes fewer calls
_TOGETHER = 1 << 20  # bytes of these at a time, of which copies are made
_TYPES = {16: torch.int64, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def is_comparable(tensor: torch.Tensor) -> bool:
    """Whether a tensor has bits of its own to be summed."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and not (tensor.is_meta or tensor.is_quantized)


class Sums:
    """The checksums of some tensors, which a GPU may still compute.

    Attributes:
        sizes: the numbers of their elements.
        gpu_seconds: that GPUs have needed, once `packed` was read.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.sizes = [tensor.numel() for tensor in tensors]
        self._packed, self.gpu_seconds = b"", 0.0
        kinds: dict[tuple[torch.device, torch.dtype, int], list[int]] = {}
        small = 0
        for number, tensor in enumerate(tensors):
            size = tensor.nbytes
            small += size if size <= _LARGE else 0
            group = -1 if size > _LARGE else small // _TOGETHER
            kinds.setdefault((tensor.device, tensor.dtype, group), []).append(number)
        with torch.no_grad():
            self._parts = [
                _Part(numbers, [tensors[number] for number in numbers], device, is_large=group < 0)
                for (device, _, group), numbers in kinds.items()
            ]

    def are_there(self) -> bool:
        """Whether `packed` waits for no GPU."""
        return all(part.is_there() for part in self._parts)

    @property
    def packed(self) -> bytes:
        """Two numbers of each tensor; waits for a GPU."""
        if self._parts:
            found = [0] * (2 * len(self.sizes))
            for part in self._parts:
                self.gpu_seconds += part.wait()
                plain, weighted = part.sums.tolist()
                for number, *both in zip(part.numbers, plain, weighted, strict=True):
                    found[2 * number : 2 * number + 2] = both
            self._packed, self._parts = struct.pack(f"{len(found)}q", *found), []
        return self._packed


def unpack(packed: bytes, number: int) -> tuple[int, int]:
    """The sums of a tensor, by its number."""
    plain, weighted = struct.unpack_from("2q", packed, 16 * number)
    return plain, weighted


class _Part:
    """The sums of tensors of one type on one device."""

    def __init__(
        self, numbers: list[int], tensors: list[torch.Tensor], device: torch.device, *, is_large: bool
    ) -> None:
        self.numbers = numbers
        self._events: list[torch.cuda.Event] = []  # before and after it on a GPU
        if device.type != "cuda":
            self.sums = _sums(tensors, is_large=is_large).cpu()
            return
        with torch.cuda.device(device):
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record()
            found = _sums(tensors, is_large=is_large)
            self.sums = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            self.sums.copy_(found, non_blocking=True)
            self._events[1].record()

    def is_there(self) -> bool:
        """Whether `wait` returns at once."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def wait(self) -> float:
        """Wait for a GPU; returns the seconds that it has needed."""
        if not self._events:
            return 0.0
        began, ended = self._events
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000


def _sums(tensors: list[torch.Tensor], *, is_large: bool) -> torch.Tensor:
    """Both sums of tensors of one type on one device, each a row."""
    if tensors[0].is_complex():
        tensors = [tensor.resolve_conj().resolve_neg() for tensor in tensors]
    return torch.stack([_large_sums(tensor) for tensor in tensors], 1) if is_large else _small_sums(tensors)


def _small_sums(tensors: list[torch.Tensor]) -> torch.Tensor:
    flat: torch.Tensor = torch._C._nn.flatten_dense_tensors(tensors)
    size = flat.element_size()
    words = flat.view(_TYPES[size])
    weights, begins, ends = _places(tuple([tensor.numel() * max(1, size // 8) for tensor in tensors]), words.device)
    totals = torch.zeros((2, len(words) + 1), dtype=torch.int64, device=words.device)
    totals[0, 1:] = words
    torch.mul(totals[0, 1:], weights, out=totals[1, 1:])
    totals.cumsum_(1)
    return totals[:, ends] - totals[:, begins]


def _large_sums(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    octets = flat.view(torch.uint8)
    whole = len(octets) // 8 * 8
    words = octets[:whole].view(torch.int64)
    rows, rest = divmod(len(words), COLUMNS)
    columns = words[: rows * COLUMNS].view(rows, COLUMNS).sum(0)  # one pass over the memory
    columns[:rest] += words[rows * COLUMNS :]
    if whole < len(octets):
        last = octets.new_zeros(8)
        last[: len(octets) - whole] = octets[whole:]
        columns[rest] += last.view(torch.int64)[0]
    return torch.stack([columns.sum(), (columns * _weights(columns.device)).sum()])


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    signed = [weight - (1 << 64) if weight >> 63 else weight for weight in weights()]
    return torch.tensor(signed, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=32)
def _places(sizes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weights of the words of small tensors, one after the other, and where each tensor begins and ends."""
    repeated = _weights(device).repeat(max(sizes) // COLUMNS + 1)
    ends = torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0).to(device)
    return torch.cat([repeated[:size] for size in sizes]), ends[:-1], ends[1:]
