"""torch's GradScaler with optimizers that were set up: it waits while they accumulate, and a step that it skips counts.

GradScaler divides the gradients in each of its steps, and so would divide the sum of an accumulation several times. It
tells nobody that it skips a step, and so the counts of ranks that train alone would differ. It knows no hooks, so its
methods are replaced once in a process; for optimizers that were not set up they do what they did.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_STEPPING = "_paceline_stepping"  # attribute of an optimizer
_LOSS = "_paceline_loss"  # attribute of a scaled loss


class Stepping:
    """The steps of an optimizer, as far as a GradScaler must know of them."""

    def __init__(self, is_accumulating: Callable[[], bool], stepped: Callable[[bool], None]) -> None:
        self.is_accumulating = is_accumulating
        self.taken = 0
        self._stepped = stepped

    def done(self) -> None:
        """The optimizer has stepped."""
        self.taken += 1
        self._stepped(False)

    def skipped(self) -> None:
        """The optimizer has not stepped, since its gradients are not finite."""
        self._stepped(True)


@dataclass
class _Since:
    """What a GradScaler was asked for since its last update: names of optimizers, by their ids.

    Attributes:
        waiting: those that accumulate.
        used: those whose gradients were unscaled.
    """

    waiting: dict[int, str] = field(default_factory=dict)
    used: dict[int, str] = field(default_factory=dict)


_since: weakref.WeakKeyDictionary[torch.amp.GradScaler, _Since] = weakref.WeakKeyDictionary()


def attach(optimizer: torch.optim.Optimizer, stepping: Stepping) -> None:
    """Let every GradScaler know the steps of an optimizer."""
    setattr(optimizer, _STEPPING, stepping)
    _replace_methods()


def unscaled(loss: torch.Tensor) -> torch.Tensor:
    """The loss that a GradScaler has scaled; any other tensor as it is."""
    found: torch.Tensor = getattr(loss, _LOSS, loss)
    return found


@functools.cache
def _replace_methods() -> None:
    for name, make in (("scale", _scale), ("unscale_", _unscale), ("step", _step), ("update", _update)):
        setattr(torch.amp.GradScaler, name, make(getattr(torch.amp.GradScaler, name)))


def _waits(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer accumulates, so that its gradients must keep their scale."""
    since = _since.setdefault(scaler, _Since())
    stepping: Stepping | None = getattr(optimizer, _STEPPING, None)
    waits = stepping is not None and stepping.is_accumulating()
    (since.used if waits else since.waiting).pop(id(optimizer), None)
    (since.waiting if waits else since.used)[id(optimizer)] = type(optimizer).__name__
    return waits


def _scale(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        result = original(self, outputs)
        if isinstance(result, torch.Tensor) and result is not outputs:
            setattr(result, _LOSS, outputs)
        return result

    return scale


def _unscale(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def unscale_(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        if not (self.is_enabled() and _waits(self, optimizer)):
            original(self, optimizer)

    return unscale_


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        stepping: Stepping | None = getattr(optimizer, _STEPPING, None)
        if not self.is_enabled():
            return original(self, optimizer, *args, **kwargs)
        if _waits(self, optimizer):
            return None
        before = stepping.taken if stepping is not None else 0
        result = original(self, optimizer, *args, **kwargs)
        if stepping is not None and stepping.taken == before:
            stepping.skipped()
        return result

    return step


def _update(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def update(self: torch.amp.GradScaler, new_scale: float | torch.Tensor | None = None) -> None:
        since = _since.pop(self, None)
        if since is None or not since.waiting:
            original(self, new_scale)
            return
        waiting = ", ".join(since.waiting.values())
        if since.used:
            raise RuntimeError(
                f"this GradScaler has unscaled the gradients of {', '.join(since.used.values())} while {waiting} "
                "accumulates those of more batches, which must all have one scale; use a GradScaler for each"
            )
        if new_scale is not None:
            raise RuntimeError(
                f"scaler.update({new_scale}) while {waiting} accumulates gradients, which must all have one scale; "
                "set it when run.accumulating is False"
            )

    return update
