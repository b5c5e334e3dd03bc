"""A sample of what lists, arrays and tensors hold, to find out whether two of them hold the same."""

from __future__ import annotations

import itertools
import math
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import torch

COMPARED = 4096  # elements of a list, array or tensor that are compared, evenly spaced
DEEPEST = 6  # data sets within data sets, and containers within containers
CLOSE = 1e-3  # relative difference up to which numbers are equal: preprocessing may round differently on another CPU


@dataclass
class Content:
    """A sample of the elements of a list, array or tensor."""

    checksum: int = 0  # of everything but floating-point numbers
    numbers: list[float] = field(default_factory=list)  # the floating-point numbers

    @property
    def total(self) -> int:
        """A checksum of all; 0 if nothing was added."""
        return zlib.crc32(repr(self.numbers).encode(), self.checksum) if self.checksum or self.numbers else 0

    def agrees(self, other: Content) -> bool:
        """Whether the elements of both are equal, except for rounding."""
        return (
            self.checksum == other.checksum
            and len(self.numbers) == len(other.numbers)
            and all(map(_is_close, self.numbers, other.numbers))
        )

    def add(self, thing: Any, depth: int = 0) -> None:
        """Add an element, or all elements of a container."""
        if isinstance(thing, float):
            self.numbers.append(thing)
        elif thing is None or isinstance(thing, int | bytes):
            self._sum(repr(thing))
        elif isinstance(thing, str | PurePath):  # data may lie in another folder on another machine
            self._sum(PurePath(thing).name if PurePath(thing).is_absolute() else str(thing))
        elif (array := as_tensor(thing)) is not None:
            self._add_tensor(array)
        elif is_sliced(thing) and depth < DEEPEST and not isinstance(thing, list | tuple | range):
            array = thing.to_numpy() if hasattr(thing, "to_numpy") else thing
            self.add(_few(array).tolist(), depth + 1)
        elif isinstance(thing, Mapping) and depth < DEEPEST:
            self._sum(f"{len(thing)}")
            for key, value in itertools.islice(thing.items(), COMPARED):
                self.add(key, depth + 1)
                self.add(value, depth + 1)
        elif isinstance(thing, list | tuple | range) and depth < DEEPEST:
            self._sum(f"{len(thing)}")
            for element in thing[:: max(1, len(thing) // COMPARED)]:
                self.add(element, depth + 1)
        else:
            self._sum(type(thing).__qualname__)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        self._sum(f"{tuple(tensor.shape)} {tensor.dtype}")
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            return
        if tensor.dim():
            tensor = tensor[:: max(1, tensor.shape[0] // COMPARED)].reshape(-1)
            tensor = tensor[:: max(1, len(tensor) // COMPARED)]
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.is_floating_point():
            self.numbers += tensor.detach().reshape(-1).tolist()
        else:
            self._sum(repr(tensor.reshape(-1).tolist()))

    def _sum(self, text: str) -> None:
        self.checksum = zlib.crc32(text.encode(errors="surrogateescape"), self.checksum)


def as_tensor(thing: Any) -> torch.Tensor | None:
    """A tensor, array, or number of numpy's as a tensor that shares its memory, if it can be one."""
    if isinstance(thing, torch.Tensor):
        return thing
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(thing, numpy.ndarray | numpy.generic):
        return None
    if thing.dtype.kind in "fc":
        return torch.from_numpy(numpy.array(_few(thing), dtype="f8" if thing.dtype.kind == "f" else "c16"))
    if thing.dtype.kind in "iub":
        return torch.from_numpy(numpy.array(_few(thing)).astype("i8"))
    return None


def is_sliced(thing: Any) -> bool:
    """Whether something is a list, an array, a tensor, or a table or column such as pandas'."""
    if isinstance(thing, torch.Tensor):
        return thing.dim() > 0 and thing.layout == torch.strided
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(thing, numpy.ndarray):
        return bool(thing.ndim)
    is_table = callable(getattr(thing, "to_numpy", None)) and hasattr(type(thing), "__len__")
    return is_table or isinstance(thing, list | tuple | range)


def _few(array: Any) -> Any:
    return array[:: max(1, array.shape[0] // COMPARED)] if array.ndim else array


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=CLOSE, abs_tol=1e-6) or (math.isnan(one) and math.isnan(other))
