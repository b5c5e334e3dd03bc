"""Forward passes in half precision."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import MutableMapping, MutableSequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class HalfPrecision:
    """Hooks that run a module's forward pass under autocast to bfloat16, and convert its results to float32.

    A copy of the module, such as an average of its weights over time, keeps the hooks.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._entered: list[torch.autocast] = []

    def enter(self, *_: object) -> None:
        """Before the forward pass."""
        if torch.compiler.is_compiling():  # it would lose the context; see `around`
            return
        context = torch.autocast(self._device_type, dtype=torch.bfloat16)
        context.__enter__()  # type: ignore[no-untyped-call]
        self._entered.append(context)

    def leave(self, _: torch.nn.Module, args: object, result: Any) -> Any:
        """After the forward pass, or after the error that ended it."""
        if not self._entered or torch.compiler.is_compiling():
            return result
        self._entered.pop().__exit__(None, None, None)
        return to_float(result)

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Do for a compiled module what the hooks do for others."""

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(self._device_type, dtype=torch.bfloat16):
                result = compiled(*args, **kwargs)
            return to_float(result)

        return call


def without_hooks(state: dict[str, Any]) -> dict[str, Any]:
    """The `__dict__` of a module without the hooks of `HalfPrecision`, for files that are read without this package."""
    kept = {
        name: type(hooks)((key, hook) for key, hook in hooks.items() if not _is_ours(hook))
        for name, hooks in state.items()
        if name in _HOOKS
    }
    return {**state, **kept}


def _is_ours(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), HalfPrecision)


def to_float(value: Any) -> Any:
    """Convert the bfloat16 tensors in a result, at any depth, to float32. Containers keep their type.

    Looks into dicts, lists, tuples, named tuples, dataclasses and their subclasses. Containers with such a tensor are
    copied; others are returned as they are.
    """
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype == torch.bfloat16 else value
    if isinstance(value, tuple):
        return _tuple(value)
    if isinstance(value, (MutableMapping, MutableSequence)):
        entries = value.items() if isinstance(value, MutableMapping) else enumerate(value)
        changed = _changed(entries)
        if changed:
            value = copy.copy(value)
            for key, entry in changed.items():
                value[key] = entry
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
        changed = _changed(fields)
        if changed:
            value = copy.copy(value)
            for name, entry in changed.items():
                object.__setattr__(value, name, entry)  # also of a frozen one
    return value


def _changed(entries: Any) -> dict[Any, Any]:
    return {key: new for key, entry in entries if (new := to_float(entry)) is not entry}


def _tuple(value: tuple[Any, ...]) -> Any:
    entries = [to_float(entry) for entry in value]
    if all(new is old for new, old in zip(entries, value, strict=True)):
        return value
    return value._make(entries) if hasattr(value, "_make") else type(value)(entries)
