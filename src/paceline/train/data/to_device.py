"""Moving a batch, whatever it is made of, to a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch


def to_device(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """`batch` with every tensor in it on `device`; containers keep their type, and the original is not changed.

    Goes into tuples, named tuples, lists, mappings and dataclasses, and calls `.to(device)` of other objects that have
    it. What is neither, such as a string or a number, is returned as it is.

    Args:
        batch: what a collate function has made.
        device: where to.
        non_blocking: do not wait for copies from pinned memory.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if callable(to := getattr(batch, "to", None)) and not isinstance(batch, type):
        return to(device)
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device, non_blocking=non_blocking) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return moved
        mapping = copy.copy(batch)  # a defaultdict or UserDict knows more than its items
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
