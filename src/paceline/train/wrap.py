"""What `Run.setup` makes of models and optimizers."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from .run import Run


class ModelMismatch(RuntimeError):
    """This rank's model differs from rank 0's, or another rank's does."""


class Model:
    """A user's model, and the module that takes its place in the training loop."""

    def __init__(self, module: torch.nn.Module, run: Run) -> None:
        strategy = run.strategy
        module.to(run.device)
        if strategy.sync_batchnorm and run.device.type == "cuda" and run.world_size > 1:
            module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        if strategy.precision == "bf16":
            autocast = torch.autocast(run.device.type, dtype=torch.bfloat16)
            module.forward = _float_results(autocast(module.forward))  # names in state_dict stay
        self.module = module
        self.wrapped: torch.nn.Module = module
        self._ddp: DistributedDataParallel | None = None
        if run.world_size > 1 and any(p.requires_grad for p in module.parameters()):
            self._ddp = self.wrapped = DistributedDataParallel(
                module,
                device_ids=[run.device] if run.device.type == "cuda" else None,
                bucket_cap_mb=strategy.bucket_cap_mb,
                find_unused_parameters=strategy.find_unused_parameters,
                gradient_as_bucket_view=True,
            )
        if strategy.compile:
            self.wrapped = torch.compile(self.wrapped)  # type: ignore[assignment]
        self.exchange(strategy.accumulate == 1)

    def exchange(self, last: bool) -> None:
        """Say whether the coming step is the last of its accumulation, and so exchanges gradients."""
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = last  # what DDP's `no_sync` sets


def prepare_optimizer(optimizer: torch.optim.Optimizer, run: Run) -> torch.optim.Optimizer:
    """Start from rank 0's state, scale learning rates as the strategy says, and step once an accumulation."""
    if run.world_size > 1:
        state = run.broadcast_object(optimizer.state_dict() if run.is_main else None)
        if state is not None:
            optimizer.load_state_dict(state)
    factor = run.strategy.learning_rate_factor(run.world_size)
    for param_group in optimizer.param_groups:
        param_group["lr"] = param_group["lr"] * factor
        if "initial_lr" in param_group:  # a scheduler was made before
            param_group["initial_lr"] = param_group["initial_lr"] * factor
    if run.strategy.accumulate > 1:
        for name in ("step", "zero_grad"):
            setattr(optimizer, name, _once_an_accumulation(getattr(optimizer, name), run))
    return optimizer


def _once_an_accumulation(method: Any, run: Run) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return None if run.accumulating else method(*args, **kwargs)

    return call


def check_alike(run: Run, module: torch.nn.Module) -> None:
    """See that every rank has rank 0's model, before DDP would hang or garble it.

    Raises:
        ModelMismatch: on every rank; the one that differs names its first difference.
    """
    mine = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()]
    theirs = run.broadcast_object(mine)
    differ = [rank for rank, alike in enumerate(run.gather_objects(mine == theirs)) if not alike]
    if run.rank in differ:
        for ours, others in zip([*mine, None], [*theirs, None], strict=False):
            if ours != others:
                raise ModelMismatch(
                    f"rank {run.rank} has the parameter {_describe(ours)}, rank 0 has {_describe(others)}"
                )
    if differ:
        raise ModelMismatch(f"the model of rank {differ[0]} is not like rank 0's; its own error says where")


def _describe(parameter: tuple[Any, ...] | None) -> str:
    if parameter is None:
        return "none more"
    name, shape, dtype, trained = parameter
    return f"{name} {list(shape)} {dtype}{'' if trained else ', not trained'}"


def _float_results(forward: Any) -> Any:
    """Give results as float32, so that losses are computed in it."""

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _to_float(forward(*args, **kwargs))

    return call


def _to_float(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.float() if result.dtype == torch.bfloat16 else result
    if isinstance(result, dict):
        return {key: _to_float(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)) and not hasattr(result, "_fields"):
        return type(result)(_to_float(value) for value in result)
    return result
