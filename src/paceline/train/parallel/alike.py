"""Checks the models of `Run.setup`: whether it supports them, and whether they are the same on all ranks."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .errors import ModelMismatch
from .wrapper import ParallelModel

if TYPE_CHECKING:
    from paceline.train.group.group import Group

    from .strategy import Strategy


def check_kind(module: torch.nn.Module) -> None:
    """Check that the ranks can train a model together, and that no other library has made it parallel.

    Raises:
        TypeError: it is wrapped in DistributedDataParallel or DataParallel, or sharded by FSDP.
        ValueError: it, or a model that it holds, was set up before.
    """
    for part in module.modules():
        what = type(part).__name__
        if isinstance(part, ParallelModel):
            raise ValueError(f"this {type(part.module).__name__} was set up before; pass a model to run.setup once")
        if isinstance(part, (DistributedDataParallel, torch.nn.DataParallel)):
            raise TypeError(
                f"the model is wrapped in {what}, but run.setup itself makes the ranks exchange gradients; "
                "pass it the model inside, model.module"
            )
        if what == "FullyShardedDataParallel" or any(kind.__name__ == "FSDPModule" for kind in type(part).__mro__):
            raise TypeError(_SHARDED.format(what="FSDP"))
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is not None and any(isinstance(p, tensors.DTensor) for p in module.parameters()):
        raise TypeError(_SHARDED.format(what="DTensor"))


_SHARDED = (
    "the model is sharded ({what}), which run.setup does not support yet: it keeps a whole copy on every rank; "
    "pass it the model without fully_shard"
)


def check_alike(group: Group, module: torch.nn.Module, strategy: Strategy) -> None:
    """Check that every rank has the same model and strategy as rank 0; otherwise, DDP would hang or corrupt the model.

    Raises:
        ModelMismatch: on every rank; a rank that differs names its first difference.
    """
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
