"""How `Run.setup` prepares optimizers."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from paceline.train.group.sharded import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.train.group.group import Group
    from paceline.train.torch_types import Arguments

    from .strategy import Strategy


# -- kinds of steps ----------------------------------------------------------------------------------------------------
# Tells steps of training from those by which torch makes the state of an optimizer, and from parts of a step.
#
# `torch.distributed.checkpoint.state_dict` steps an optimizer that has no state, with gradients and a learning rate of
# zero, before it reads or sets its state. That trains nothing.


_MODULE = "torch.distributed.checkpoint.state_dict"
_STEP = torch.optim.Optimizer.profile_hook_step(max).__code__  # of every step: it calls the hooks
_DEPTH = 20  # frames of hooks, wrappers and schedulers between that module and the end of the step


def only_makes_state() -> bool:
    """Whether the current step of an optimizer is such a one; called within it."""
    if _MODULE not in sys.modules:
        return False
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame.f_globals.get("__name__") == _MODULE:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def is_part_of_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of a subclass has called that of its base class, which calls the hooks again."""
    frame, number = sys._getframe(1), 0
    while frame.f_back is not None and number < 2:
        number += frame.f_code is _STEP and frame.f_locals["self"] is optimizer
        frame = frame.f_back
    return number == 2


# -- torch's GradScaler ------------------------------------------------------------------------------------------------
# It waits while optimizers that were set up accumulate, and a step that it skips counts.
#
# GradScaler divides the gradients in each of its steps, and so would divide the sum of an accumulation several times.
# It tells nobody that it skips a step, and so the counts of ranks that train alone would differ. It knows no hooks, so
# its methods are replaced once in a process; for optimizers that were not set up they do what they did.


_STEPPING = "_paceline_stepping"  # attribute of an optimizer
_LOSS = "_paceline_loss"  # attribute of a scaled loss


class Stepping:
    """The steps of an optimizer, as far as a GradScaler must know of them."""

    def __init__(
        self,
        group: Group,
        is_accumulating: Callable[[], bool],
        is_divided: Callable[[], bool],
        stepped: Callable[[bool], None],
    ) -> None:
        self.group = group
        self.is_accumulating, self.is_divided = is_accumulating, is_divided
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
        if self.is_enabled() and _waits(self, optimizer):
            return
        stepping: Stepping | None = getattr(optimizer, _STEPPING, None)
        if stepping is None or not (self.is_enabled() and stepping.is_divided()):
            original(self, optimizer)
            return
        self.scale(torch.zeros((), device=stepping.group.device))  # a rank without the loss has scaled nothing so far
        # torch's takes sharded gradients, but not together with whole ones; ranks must skip a step together.
        groups = [group["params"] for group in optimizer.param_groups]
        try:
            for group in optimizer.param_groups:
                group["params"] = [_part_of(parameter) for parameter in group["params"]]
            original(self, optimizer)
        finally:
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        worst = stepping.group.all_reduce(max((float(each) for each in found.values()), default=0.0), "max")
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {
            stepping.group.device: torch.tensor(worst, dtype=torch.float32, device=stepping.group.device)
        }

    return unscale_


def _part_of(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, with that of its gradient; a whole parameter is returned itself."""
    if not is_dtensor(parameter):
        return parameter
    part = parameter.to_local().detach().requires_grad_()
    part.grad = parameter.grad.to_local() if is_dtensor(parameter.grad) else None
    return part


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        stepping: Stepping | None = getattr(optimizer, _STEPPING, None)
        if not self.is_enabled():
            return original(self, optimizer, *args, **kwargs)
        if _waits(self, optimizer):
            return None
        before = stepping.taken if stepping is not None else 0
        if stepping is not None and stepping.is_divided() and not _is_unscaled(self, optimizer):
            self.unscale_(optimizer)
        result = original(self, optimizer, *args, **kwargs)
        if stepping is not None and stepping.taken == before:
            stepping.skipped()
        return result

    return step


def _is_unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    return bool(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"])


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


# -- setting up --------------------------------------------------------------------------------------------------------


def prepare_optimizer(
    optimizer: torch.optim.Optimizer,
    group: Group,
    strategy: Strategy,
    *,
    is_accumulating: Callable[[], bool],
    is_divided: Callable[[], bool],
    reduced_loss: Callable[[Any], Any],
    stepped: Callable[[bool], None],
) -> None:
    """Load rank 0's state, scale learning rates as the strategy says, and step once per accumulation."""
    scaling = strategy.lr_scaling
    if scaling != "none" and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"lr_scaling={scaling!r} does not reach the scheduler that was made with {type(optimizer).__name__} "
            "before run.setup; make the scheduler after it"
        )
    if group.world_size > 1:
        state = optimizer.state_dict()
        shared = {"param_groups": state["param_groups"]} if is_divided() else state
        # Also what each rank has is loaded, so that it keeps its part of that.
        optimizer.load_state_dict({**state, **group.broadcast_object(shared)})
    factor = strategy.learning_rate_factor(group.data_size)
    for param_group in optimizer.param_groups if factor != 1 else ():
        for name in ("lr", "initial_lr"):  # a loaded state may have the latter, for a scheduler to continue from
            if param_group.get(name) is not None:  # some optimizers compute their own learning rate
                param_group[name] = param_group[name] * factor
    if group.world_size > 1:  # an optimizer that uses its loss must get the same on all ranks
        optimizer.register_step_pre_hook(functools.partial(_with_reduced_loss, reduced_loss))
    stepping = Stepping(group, is_accumulating, is_divided, stepped)
    optimizer.register_step_post_hook(lambda *_: None if only_makes_state() else stepping.done())
    attach(optimizer, stepping)
    if strategy.accumulate > 1:
        for name in ("step", "zero_grad"):
            setattr(optimizer, name, _once_per_accumulation(getattr(optimizer, name), optimizer, is_accumulating))


def _with_reduced_loss(
    reduced_loss: Callable[[Any], Any], _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    """Before a step: make its closure, if there is one, return the loss over all ranks."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None

    def reduced() -> Any:
        return reduced_loss(closure())

    return ((args[0], reduced, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": reduced})


def _once_per_accumulation(method: Any, optimizer: torch.optim.Optimizer, is_accumulating: Callable[[], bool]) -> Any:
    @functools.wraps(method)
    def call(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if method.__name__ == "step" and (args[0] if args else kwargs.get("closure")) is not None:
            raise RuntimeError(
                "a closure computes the gradients of a whole step, so a step cannot accumulate several calls; "
                "use Strategy(accumulate=1) for this optimizer, and loop over the batches in the closure"
            )
        return None if is_accumulating() and not only_makes_state() else method(*args, **kwargs)

    return types.MethodType(call, optimizer)  # schedulers use its `__func__`
