"""Moves a batch, of any structure, to a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch


def to_device(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """Return `batch` with every tensor in it on `device`. Containers keep their type; the original is not changed.

    Looks into tuples, named tuples, lists, mappings and dataclasses, and calls `.to(device)` of other objects that have
    it. Everything else, such as strings and numbers, is returned as it is.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if callable(to := getattr(batch, "to", None)) and not isinstance(batch, type):
        return to(device)
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device, non_blocking=non_blocking) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return moved
        mapping = copy.copy(batch)  # a defaultdict or UserDict has more state than its items
        mapping.update(moved)
        return mapping
    if isinstance(batch, tuple | list):
        values = [to_device(value, device, non_blocking=non_blocking) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        clone = copy.copy(batch)
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                value = to_device(getattr(batch, field.name), device, non_blocking=non_blocking)
                object.__setattr__(clone, field.name, value)  # frozen dataclasses too
        return clone
    return batch
