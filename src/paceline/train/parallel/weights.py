"""Files with the numbers of a model, of safetensors or with a state_dict of `torch.save`, mapped into memory."""

from __future__ import annotations

import json
import math
import mmap
import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.train.torch_types import StateDict

_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
TYPES: dict[str, torch.dtype] = {kind: getattr(torch, name) for kind, name in _NAMES.items() if hasattr(torch, name)}
"""The types that safetensors knows by its names, as far as this torch has them."""


class Weights:
    """The numbers of parameters and buffers, of which only what is used is read."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = {name: each for name, each in tensors.items() if isinstance(each, torch.Tensor)}

    @classmethod
    def of_files(cls, files: Sequence[str | os.PathLike[str]]) -> Weights:
        """Those in some files, see `read_state`."""
        return cls({name: each for file in files for name, each in read_state(os.fspath(file)).items()})

    def get(self, name: str, like: torch.Tensor) -> torch.Tensor | None:
        """A copy of a tensor; None if there is none."""
        found = self._tensors.get(name)
        if found is None:
            return None
        if found.shape != like.shape:
            raise ValueError(f"the weights have {name} as {list(found.shape)}, and the model as {list(like.shape)}")
        return found.to(like.dtype, copy=True)


def read_state(file: str) -> StateDict:
    """What a file has, by its name: tensors, and with `torch.save` maybe other things.

    Raises:
        ValueError: it is neither of safetensors nor of `torch.save`.
    """
    return _safetensors(file) if file.endswith(".safetensors") else _saved(file)


def _safetensors(file: str) -> StateDict:
    """The tensors of a file; the format is that of https://github.com/huggingface/safetensors."""
    try:
        with open(file, "rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        begin = 8 + int.from_bytes(mapped[:8], "little")
        found = {}
        for name, entry in json.loads(mapped[8:begin]).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                kind = TYPES[entry["dtype"]]
                count = math.prod(entry["shape"])
                if first < 0 or last - first != count * kind.itemsize:
                    raise ValueError(f"{name} is not as long as its shape says")
                flat = torch.empty(0, dtype=kind)
                if count:
                    flat = torch.frombuffer(mapped, dtype=kind, count=count, offset=begin + first)
                found[name] = flat.view(entry["shape"])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{file} is not a file of safetensors: {_brief(error)}") from None
    return found


def _saved(file: str) -> StateDict:
    """What is in a file of `torch.save`."""
    try:
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # unpickling may raise anything
        raise ValueError(f"{file} is neither of safetensors nor a state_dict of torch.save: {_brief(error)}") from None
    if not isinstance(state, dict):
        raise ValueError(f"{file} is no state_dict of torch.save: it has a {type(state).__name__}")
    return state


def _brief(error: Exception) -> str:
    """What an error says, in one line."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:200] if not isinstance(error, KeyError) else f"it has {lines[0][:200]}"
