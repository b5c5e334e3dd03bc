"""What `Run.setup` makes of optimizers."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from paceline.train.run import Run

    _Together = AbstractContextManager[None]


def prepare_optimizer(optimizer: torch.optim.Optimizer, run: Run) -> torch.optim.Optimizer:
    """Start from rank 0's state, scale learning rates as the strategy says, and step once an accumulation.

    Raises:
        ValueError: learning rates are to be scaled, and a scheduler has noted what they were before.
    """
    scaling = run.strategy.lr_scaling
    if scaling != "none" and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"lr_scaling={scaling!r} does not reach the scheduler that was made with {type(optimizer).__name__} "
            "before run.setup; make the scheduler after it"
        )
    if run.world_size > 1:
        state = run.broadcast_object(optimizer.state_dict() if run.is_main else None)
        if state is not None:
            optimizer.load_state_dict(state)
    factor = run.strategy.learning_rate_factor(run.world_size)
    for param_group in optimizer.param_groups:
        param_group["lr"] = param_group["lr"] * factor
        if "initial_lr" in param_group:  # loaded, for a scheduler to go on from
            param_group["initial_lr"] = param_group["initial_lr"] * factor
    optimizer.register_step_post_hook(lambda *_: run.optimizer_stepped())
    if run.strategy.accumulate > 1:
        for name in ("step", "zero_grad"):
            setattr(optimizer, name, _once_an_accumulation(getattr(optimizer, name), optimizer, run))
    return optimizer


def _once_an_accumulation(method: Any, optimizer: torch.optim.Optimizer, run: Run) -> Any:
    @functools.wraps(method)
    def call(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return None if run.accumulating else method(*args, **kwargs)

    return types.MethodType(call, optimizer)  # schedulers take its `__func__`
