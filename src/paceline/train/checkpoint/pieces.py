"""What is sharded in checkpoints: each rank writes its pieces, and any number of ranks reads the parts that they need.

In the state of a part of the checkpoint, an empty tensor on the meta device, which has a shape and a type and no
numbers, stands for a sharded one. Its pieces are in the files `shard-00000.pt` …, one for each rank that has some: for
each part a dict from the path of the tensor, a tuple of keys, to where the piece begins in each dimension, and its
numbers.
"""

from __future__ import annotations

import collections
import functools
import hashlib
from typing import TYPE_CHECKING, Any

import torch

from paceline.train.group.sharded import is_dtensor
from paceline.train.parallel.shard.layout import from_part, part_of, place_in, place_of

from .errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch.distributed.tensor import DTensor

    States = dict[str, Any]  # of the parts of a checkpoint, by their names
    Place = tuple[tuple[int, ...], tuple[int, ...]]  # the shape of a piece, and where it begins in each dimension
    Path_ = tuple[Any, ...]  # of keys and indices
    Pieces = dict[str, dict[Path_, tuple[tuple[int, ...], torch.Tensor]]]


_DICTS = (dict, collections.OrderedDict)


# -- saving ------------------------------------------------------------------------------------------------------------


def split(states: Mapping[str, Any]) -> tuple[States, Pieces, str]:
    """The states without what is sharded, this rank's pieces of that, and a digest of which tensors these are.

    Copies nothing. The digest must be the same on all ranks.
    """
    pieces: Pieces = {}
    digest = hashlib.sha256()
    places = functools.cache(place_in)  # most tensors have the shape of others, and torch takes its time
    with torch.no_grad():
        left = {part: _split(state, part, (), pieces, digest, places=places) for part, state in states.items()}
    return left, pieces, digest.hexdigest()


def _split(
    value: Any, part: str, path: Path_, pieces: Pieces, digest: hashlib._Hash, *, places: Callable[..., Place]
) -> Any:
    if is_dtensor(value):
        digest.update(repr((part, path, tuple(value.shape), value.dtype)).encode())
        shape, begin = places(value.shape, value.device_mesh, value.placements)
        if _is_first(value) and 0 not in shape:
            pieces.setdefault(part, {})[path] = begin, value.to_local().detach()
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, torch.Tensor) and value.device.type == "meta":
        raise CheckpointError(f"{part}: {'.'.join(map(str, path))} is on the meta device, and so has no numbers")
    if isinstance(value, dict):
        new = {key: _split(each, part, (*path, key), pieces, digest, places=places) for key, each in value.items()}
        if all(new[key] is each for key, each in value.items()):
            return value
        made = type(value)(new) if type(value) in _DICTS else new
        if hasattr(value, "_metadata"):  # of a module's state
            made.__dict__["_metadata"] = value._metadata
        return made
    if isinstance(value, (list, tuple)):
        parts = [_split(each, part, (*path, index), pieces, digest, places=places) for index, each in enumerate(value)]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def _is_first(tensor: DTensor) -> bool:
    """Whether this rank is the first of those that have the same piece."""
    coordinates: Sequence[int] | None = tensor.device_mesh.get_coordinate()
    return coordinates is not None and all(
        coordinate == 0 or not placement.is_replicate()
        for coordinate, placement in zip(coordinates, tensor.placements, strict=True)
    )


# -- loading -----------------------------------------------------------------------------------------------------------


class Shards:
    """The pieces of all ranks that saved a checkpoint; files are mapped into memory, and read as far as needed."""

    def __init__(self, files: list[Path], read: Callable[[Path], Any]) -> None:
        self._files, self._read = files, read
        self._found: dict[tuple[str, Path_], dict[tuple[int, ...], torch.Tensor]] | None = None

    def fill(self, part: str, state: Any, likes: Callable[[Path_, torch.Size], DTensor | None]) -> Any:
        """The state of a part with its numbers: of each sharded tensor the whole, or what `likes` says is needed.

        Args:
            part: its name.
            state: as it is in the part's file.
            likes: is given the path and the shape of a tensor, and returns one that is cut as it is to be; None for a
                whole one.
        """
        return self._filled(state, part, (), likes)

    def _filled(self, value: Any, part: str, path: Path_, likes: Callable[[Path_, torch.Size], DTensor | None]) -> Any:
        if isinstance(value, torch.Tensor):
            like = likes(path, value.shape)
            if value.device.type != "meta":
                return value if like is None else part_of(value, like)
            if like is None:
                return self._cut(part, path, value, (tuple(value.shape), (0,) * value.dim()))
            return from_part(self._cut(part, path, value, place_of(like)), like)
        if not isinstance(value, (dict, list, tuple)):
            return value
        for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
            new = self._filled(each, part, (*path, key), likes)
            if new is not each:
                if isinstance(value, tuple):
                    value = [*value]
                value[key] = new
        return value

    def _cut(self, part: str, path: Path_, like: torch.Tensor, place: Place) -> torch.Tensor:
        """Part of a tensor, from the pieces of all ranks."""
        shape, begin = place
        cut = torch.empty(shape, dtype=like.dtype)
        missing = cut.numel()
        for at, piece in self._pieces(part, path):
            first = [max(a, b) for a, b in zip(begin, at, strict=True)]
            ends = zip(begin, shape, at, piece.shape, strict=True)
            last = [min(b + s, a + p) for b, s, a, p in ends]
            if any(f >= e for f, e in zip(first, last, strict=True)):
                continue
            target = cut[tuple(slice(f - b, e - b) for f, e, b in zip(first, last, begin, strict=True))]
            target.copy_(piece[tuple(slice(f - a, e - a) for f, e, a in zip(first, last, at, strict=True))])
            missing -= target.numel()
        if missing:
            raise CheckpointError(f"{part}: {missing} numbers of {'.'.join(map(str, path))} are in no file")
        return cut

    def _pieces(self, part: str, path: Path_) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        if self._found is None:
            self._found = {}
            for file in self._files:
                for name, paths in self._read(file).items():
                    for where, piece in paths.items():
                        # Ranks that compute layers together have the same of those that they do not divide.
                        self._found.setdefault((name, where), {})[piece[0]] = piece[1]
        return [*self._found.get((part, path), {}).items()]
