"""How `Run.setup` prepares optimizers."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch

from .loss_scaling import Stepping, attach
from .step_kinds import only_makes_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.train.group.group import Group

    from .strategy import Strategy


def prepare_optimizer(
    optimizer: torch.optim.Optimizer,
    group: Group,
    strategy: Strategy,
    *,
    is_accumulating: Callable[[], bool],
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
        state = group.broadcast_object(optimizer.state_dict() if group.is_main else None)
        if state is not None:
            optimizer.load_state_dict(state)
    factor = strategy.learning_rate_factor(group.world_size)
    for param_group in optimizer.param_groups if factor != 1 else ():
        for name in ("lr", "initial_lr"):  # a loaded state may have the latter, for a scheduler to continue from
            if param_group.get(name) is not None:  # some optimizers compute their own learning rate
                param_group[name] = param_group[name] * factor
    if group.world_size > 1:  # an optimizer that uses its loss must get the same on all ranks
        optimizer.register_step_pre_hook(functools.partial(_with_reduced_loss, reduced_loss))
    stepping = Stepping(is_accumulating, stepped)
    optimizer.register_step_post_hook(lambda *_: None if only_makes_state() else stepping.done())
    attach(optimizer, stepping)
    if strategy.accumulate > 1:
        for name in ("step", "zero_grad"):
            setattr(optimizer, name, _once_per_accumulation(getattr(optimizer, name), optimizer, is_accumulating))


def _with_reduced_loss(
    reduced_loss: Callable[[Any], Any], _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
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
