"""Optimizers that `Run.setup` was not given: their steps count, and one whose state no checkpoint holds is refused."""

from __future__ import annotations

import gc
import inspect
import itertools
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.train.parallel.optimizer import only_makes_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.utils.hooks import RemovableHandle

    from paceline.train.parallel.prepared import Prepared

_DEPTH = 3  # of attributes and containers in which a wrapper may have its optimizer
_MOST = 1000  # elements of a container in which it is looked for
_NONE = (torch.Tensor, torch.nn.Module, type, types.ModuleType, types.FunctionType)  # in these it is not looked for
_handles: list[RemovableHandle] = []  # of the run that was made last


class OtherOptimizers:
    """Sees the steps of all optimizers of this process, by torch's global hooks; of several runs, the last does."""

    def __init__(self, prepared: Prepared, *, stepped: Callable[[int], None], refuses: Callable[[], bool]) -> None:
        self._prepared, self._stepped, self._refuses = prepared, stepped, refuses
        self._ignored: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # set up, or left out
        self._kept: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # by what was registered
        # All others: whether they had a state when they were looked at, and how many things checkpoints held.
        self._others: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[bool, int]] = weakref.WeakKeyDictionary()
        while _handles:
            _handles.pop().remove()
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step), register_optimizer_step_post_hook(self._after_step)
        ]  # fmt: skip
        _handles.extend(self._handles)

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()

    def leave_out(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Ignore the steps of these."""
        self._ignored.update(optimizers)

    def check(self) -> None:
        """Check that checkpoints hold the state of every optimizer that has stepped, and that still exists."""
        if self._lost() is None:
            return
        gc.collect()  # one with a scheduler refers to itself, and so may be there when the script has released it
        lost = self._lost()
        if lost is not None:
            raise RuntimeError(
                f"{lost} has stepped, but checkpoints do not hold its state, so a resumed run would go on without: "
                "write run.setup(model, optimizer) or run.register(name=optimizer), or run.leave_out(optimizer) if "
                "it may be lost"
            )

    def _lost(self) -> str | None:
        """The class of an optimizer whose state no checkpoint holds."""
        for optimizer, (is_stateful, _) in list(self._others.items()):
            self._look_at(optimizer)
            if is_stateful and optimizer not in self._ignored and optimizer not in self._kept:
                return type(optimizer).__name__
        return None

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._prepared.before_step(optimizer, has_closure=closure is not None)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in self._ignored or only_makes_state():
            return
        if optimizer not in self._kept:
            now = (has_state(optimizer), self._prepared.size)
            if self._others.get(optimizer) != now:
                self._others[optimizer] = now
                self._look_at(optimizer)
            if optimizer in self._ignored:
                return
            if now[0] and optimizer not in self._kept and self._refuses():
                self.check()
            if optimizer not in self._kept and self._prepared.has_optimizers:
                return  # it serves something else, as in an inner loop
        self._stepped(id(optimizer))

    def _look_at(self, optimizer: torch.optim.Optimizer) -> None:
        """Find out what it is part of. The steps of one that was set up, and of one inside of it, are known."""
        if any(saves(thing, optimizer) for thing in (*self._ignored, *self._prepared.optimizers)):
            self._ignored.add(optimizer)
        elif any(saves(thing, optimizer) for thing in (*self._prepared.registered, *self._prepared.modules)):
            self._kept.add(optimizer)


def has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a resumed run would miss it: what it keeps for its parameters, or the learning rates of a scheduler."""
    return any(optimizer.state.values()) or any("initial_lr" in group for group in optimizer.param_groups)


def saves(thing: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the state of a thing has that of an optimizer: it is the optimizer, or one made of it, such as Lookahead.

    What has an optimizer need not save it: a scheduler does not, and some wrappers save their own state only. A thing
    may also have it by the name of a variable in its `state_dict`.
    """
    if thing is optimizer:
        return True
    if not any(_holds(part, optimizer, _DEPTH - 1) for part in (*_parts(thing), *_names_of(thing.state_dict))):
        return False
    try:
        state = thing.state_dict()
    except Exception:
        return True
    kept = next((set(each) for each in optimizer.state.values() if isinstance(each, dict) and each), {"param_groups"})
    return _has_keys(state, kept, _DEPTH + 2)


def _holds(thing: Any, optimizer: torch.optim.Optimizer, depth: int) -> bool:
    """Whether a thing is an optimizer, or has it among its attributes or elements, or theirs."""
    if thing is optimizer:
        return True
    if depth == 0 or isinstance(thing, _NONE):
        return False
    return any(_holds(part, optimizer, depth - 1) for part in itertools.islice(_parts(thing), _MOST))


def _has_keys(state: Any, keys: set[Any], depth: int) -> bool:
    """Whether some dictionary of a state has all these keys."""
    if isinstance(state, dict) and keys <= state.keys():
        return True
    parts = _parts(state) if isinstance(state, (dict, list, tuple)) else ()
    return depth > 0 and any(_has_keys(part, keys, depth - 1) for part in itertools.islice(parts, _MOST))


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, dict):
        return thing.values()
    if isinstance(thing, (list, tuple)):
        return thing
    slots = [name for kind in type(thing).__mro__ for name in _listed(kind.__dict__.get("__slots__", ()))]
    return [*getattr(thing, "__dict__", {}).values(), *(getattr(thing, name, None) for name in slots)]


def _listed(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _names_of(method: Any) -> Iterable[Any]:
    """What a method refers to by the names of variables outside of it."""
    try:
        names = inspect.getclosurevars(method)
    except TypeError:  # it is not written in Python
        return ()
    return (*names.nonlocals.values(), *names.globals.values())
