"""Forward passes in half precision."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from .nested import mapped

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.train.torch_types import StateDict

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
        return _to_float(result)

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Do for a compiled module what the hooks do for others."""

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(self._device_type, dtype=torch.bfloat16):
                result = compiled(*args, **kwargs)
            return _to_float(result)

        return call


def without_hooks(state: StateDict) -> StateDict:
    """The `__dict__` of a module without the hooks of `HalfPrecision`, for files that are read without this package."""
    kept = {
        name: type(hooks)((key, hook) for key, hook in hooks.items() if not _is_ours(hook))
        for name, hooks in state.items()
        if name in _HOOKS
    }
    return {**state, **kept}


def _is_ours(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), HalfPrecision)


def _to_float(result: Any) -> Any:
    """Convert the bfloat16 tensors in a result, at any depth, to float32."""
    return mapped(result, lambda each: each.float() if each.dtype == torch.bfloat16 else each)
