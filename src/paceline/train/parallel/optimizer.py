"""What `Run.setup` makes of optimizers."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.train.group.group import Group

    from .strategy import Strategy


def prepare_optimizer(
    optimizer: torch.optim.Optimizer,
    group: Group,
    strategy: Strategy,
    is_accumulating: Callable[[], bool],
    stepped: Callable[[], None],
) -> None:
    """Start from rank 0's state, scale learning rates as the strategy says, and step once an accumulation.

    Args:
        optimizer: the user's.
        group: the ranks.
        strategy: the choices that it is set up with.
        is_accumulating: whether gradients wait for those of further batches, so that it does not step yet.
        stepped: called after each of its steps.

    Raises:
        ValueError: learning rates are to be scaled, and a scheduler has noted what they were before.
    """
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
    for param_group in optimizer.param_groups:
        param_group["lr"] = param_group["lr"] * factor
        if "initial_lr" in param_group:  # loaded, for a scheduler to go on from
            param_group["initial_lr"] = param_group["initial_lr"] * factor
    optimizer.register_step_post_hook(lambda *_: stepped())
    if strategy.accumulate > 1:
        for name in ("step", "zero_grad"):
            setattr(optimizer, name, _once_an_accumulation(getattr(optimizer, name), optimizer, is_accumulating))


def _once_an_accumulation(method: Any, optimizer: torch.optim.Optimizer, is_accumulating: Callable[[], bool]) -> Any:
    @functools.wraps(method)
    def call(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return None if is_accumulating() else method(*args, **kwargs)

    return types.MethodType(call, optimizer)  # schedulers take its `__func__`
