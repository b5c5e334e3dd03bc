"""Checks the models of `Run.setup`: whether it supports them, and whether they are the same on all ranks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.jit._script import RecursiveScriptModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from paceline.train.group import sharded

from .errors import ModelMismatch
from .wrapper import ParallelModel

if TYPE_CHECKING:
    from paceline.train.group.group import Group

    from .strategy import Strategy


def check_kind(module: torch.nn.Module) -> None:
    """Check that the ranks can train a model together, and that no other library has made it parallel."""
    for part in module.modules():
        what = type(part).__name__
        if isinstance(part, ParallelModel):
            raise ValueError(f"this {type(part.module).__name__} was set up before; pass a model to run.setup once")
        if isinstance(part, (DistributedDataParallel, torch.nn.DataParallel)):
            raise TypeError(
                f"the model is wrapped in {what}, but run.setup itself makes the ranks exchange gradients; "
                "pass it the model inside, model.module"
            )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"{name} has no shape yet, since a lazy layer learns it from its first batch; call the model with a "
                "batch once before run.setup: with torch.no_grad(): model(batch)"
            )
    found = sharded.in_object(module)
    if found is not None:
        raise TypeError(
            f"the {type(module).__name__} is sharded in a way that run.setup does not support: {found}; pass it the "
            "model as it was before, with Strategy(shard=True), or shard it by torch's fully_shard (docs/sharding.md)"
        )


def check_options(module: torch.nn.Module, strategy: Strategy) -> None:
    """Check that a strategy can change what TorchScript has compiled."""
    is_scripted = isinstance(module, RecursiveScriptModule)  # a traced one takes hooks
    has_scripted = any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
    for option, refuses in [
        ("precision", strategy.precision != "fp32" and is_scripted),  # it takes no hooks
        ("compile", bool(strategy.compile) and is_scripted),
        ("sync_batchnorm", strategy.sync_batchnorm and has_scripted),  # torch does not find the layers in it
    ]:
        if refuses:
            raise TypeError(
                f"Strategy({option}={getattr(strategy, option)!r}) cannot change a model of TorchScript; leave "
                f"{option} out, or pass run.setup the model as it was before torch.jit"
            )


def check_optimizer_kind(optimizer: torch.optim.Optimizer) -> None:
    """Check that it is known which part of its parameters a rank has."""
    found = sharded.in_object(optimizer)
    if found is not None:
        raise TypeError(
            f"the {type(optimizer).__name__} has parameters that are sharded in a way that run.setup does not support: "
            f"{found}; use Strategy(shard=True), or torch's fully_shard (docs/sharding.md)"
        )


def check_alike(group: Group, module: torch.nn.Module, strategy: Strategy) -> None:
    """Check that every rank has rank 0's model and strategy; otherwise, DDP would hang or corrupt the model."""
    check_options(module, strategy)
    mine = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()]
    theirs, chosen = group.broadcast_object((mine, strategy))
    is_alike = mine == theirs and strategy == chosen
    differ = [rank for rank, alike in enumerate(group.gather_objects(is_alike)) if not alike]
    if group.rank in differ:
        for field in dataclasses.fields(strategy):
            ours, others = getattr(strategy, field.name), getattr(chosen, field.name)
            if ours != others:
                raise ModelMismatch(
                    f"rank {group.rank} has Strategy({field.name}={ours!r}), rank 0 has {others!r}; give all the same"
                )
        for ours, others in zip([*mine, None], [*theirs, None], strict=False):
            if ours != others:
                raise ModelMismatch(f"rank {group.rank} has {_describe(ours)}, rank 0 has {_describe(others)}")
    if differ:
        raise ModelMismatch(f"the model of rank {differ[0]} differs from rank 0's; the error of that rank says where")


def _describe(parameter: tuple[Any, ...] | None) -> str:
    if parameter is None:
        return "no further parameter"
    name, shape, dtype, trained = parameter
    return f"the parameter {name} {list(shape)} {dtype}{'' if trained else ', not trained'}"
