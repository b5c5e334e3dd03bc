"""Which states a checkpoint may hold: those that `torch.load(..., weights_only=True)` reads, without running code."""

from __future__ import annotations

import io
import pickle
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter)
_SMALL = 2**1000  # for integers from here on, it is not enough to check the type


def unsafe_names(file: Path | io.BytesIO) -> list[str]:
    """The classes and functions for which `torch.load(..., weights_only=True)` would refuse a `torch.save` file.

    Those that were marked with `torch.serialization.add_safe_globals` are not among them. No code from the file is run.
    """
    if isinstance(file, io.BytesIO):
        file.seek(0)
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except (pickle.UnpicklingError, ValueError, RuntimeError, KeyError, IndexError, EOFError):
        return ["something that is neither a tensor nor plain data"]


def without_numpy_scalars(state: Any) -> Any:
    """The state with NumPy scalars, such as a best loss that a scheduler stores, replaced by Python numbers."""
    numpy = sys.modules.get("numpy")
    return state if numpy is None else _without(numpy.generic, state)


def _without(scalar: type, state: Any) -> Any:
    if isinstance(state, scalar):
        return state.item()  # type: ignore[attr-defined]
    if type(state) is dict:
        return {_without(scalar, key): _without(scalar, value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_without(scalar, value) for value in state)
    return state


def why_refused(state: object, names: list[str]) -> str:
    """Which entry of a state is refused because of these names, and what to do, in one line."""
    found = next(_entries(state, "", set()), None)
    what = ", ".join(names) if found is None else f"{found[0]} is of type {_class(found[1])}"
    return (
        f"{what}, which torch.load(..., weights_only=True) does not read; keep tensors, numbers, strings, or lists, "
        "tuples and dicts of them in the state, or mark the class with torch.serialization.add_safe_globals"
    )


def why_unread(names: list[str]) -> str:
    """Why a file cannot be read, and what to do, in one line."""
    return (
        f"it holds {', '.join(names)}, which could run code when it is read; only if you trust the file, call "
        "torch.serialization.add_safe_globals with these first"
    )


def _entries(state: object, path: str, seen: set[int]) -> Iterator[tuple[str, object]]:
    """The innermost entries of a state that are refused, with their paths."""
    if type(state) in _ATOMS and not (isinstance(state, int) and abs(state) > _SMALL):
        return
    if id(state) in seen:
        return
    seen.add(id(state))
    inner: list[tuple[str, Any]] = []
    if isinstance(state, dict):
        for key, value in state.items():
            inner += [(f"{path}[{key!r}]", value), (f"the key {key!r} of {path or 'the state'}", key)]
    elif isinstance(state, (list, tuple, set, frozenset)):
        inner = [(f"{path}[{number}]", value) for number, value in enumerate(state)]
    for where, value in inner:
        yield from _entries(value, where, seen)
    file = io.BytesIO()
    torch.save(state, file)
    if unsafe_names(file):
        yield path or "the state", state


def _class(thing: object) -> str:
    kind = type(thing)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
