"""Tensors within containers, such as what a model is called with and returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping, MutableSequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_DEPTH = 10  # of containers, of which one may contain itself


def tensors_in(value: Any, kind: type[Any] = torch.Tensor, depth: int = _DEPTH) -> Iterator[Any]:
    """The tensors, or objects of another kind, in dicts, lists, tuples and dataclasses."""
    if isinstance(value, kind):
        yield value
    elif depth and isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each, kind, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each, kind, depth - 1)
    elif depth and dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), kind, depth - 1)


def mapped(value: Any, change: Callable[[Any], Any], kind: type[Any] = torch.Tensor) -> Any:
    """Change the tensors, or objects of another kind, in dicts, lists, tuples, dataclasses and their subclasses.

    Containers with one that changes are copied; others are returned as they are.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple):
        entries = [mapped(each, change, kind) for each in value]
        if all(new is old for new, old in zip(entries, value, strict=True)):
            return value
        return value._make(entries) if hasattr(value, "_make") else type(value)(entries)
    if isinstance(value, (MutableMapping, MutableSequence)):
        pairs = value.items() if isinstance(value, MutableMapping) else enumerate(value)
        changed = {key: new for key, each in pairs if (new := mapped(each, change, kind)) is not each}
        if changed:
            value = copy.copy(value)
            for key, each in changed.items():
                value[key] = each
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        values = {name: new for name, each in fields.items() if (new := mapped(each, change, kind)) is not each}
        if values:
            value = copy.copy(value)
            for name, each in values.items():
                object.__setattr__(value, name, each)  # also of a frozen one
    return value
