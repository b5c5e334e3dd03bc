"""Finds what is sharded: each rank has only a part of it, so one rank's state is not that of all ranks.

The classes are looked up in modules that are already imported. Importing them takes long, and without them there is no
such tensor.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.tensor import DTensor

_TENSORS = (("torch.distributed.tensor", "DTensor"), ("torch.distributed._shard.sharded_tensor", "ShardedTensor"))
_MODULE = "FullyShardedDataParallel"
_CONTAINERS = (dict, list, tuple, set, frozenset)
_PLAIN = {int, float, str, bool, type(None)}  # a state may have many of these
_TO_SAVE = (
    "each rank has a part of it, and it does not say which; shard it by torch's fully_shard or Strategy(shard=True) "
    "(docs/sharding.md), or pass per_rank=True to run.register"
)


def kind_of(value: object) -> str | None:
    """What a sharded tensor is, such as "a DTensor", which may also be replicated; None for everything else."""
    if not isinstance(value, torch.Tensor):
        return None
    for module, name in _TENSORS:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(value, kind):
            return f"a {name}"
    if getattr(value, "_fsdp_flattened", False):  # FSDP1 marks the parameters that it cuts into parts
        return "sharded by FullyShardedDataParallel"
    return None


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether a model, or a part of it, is sharded by torch's `fully_shard`."""
    return any(kind.__name__ == "FSDPModule" for part in module.modules() for kind in type(part).__mro__)


def name_of(module: torch.nn.Module) -> str:
    """The name of a model's class; that of one of `fully_shard` without what torch puts before it."""
    kinds = type(module).__mro__
    own = [kind for number, kind in enumerate(kinds) if number > 1 and kinds[number - 1].__name__ == "FSDPModule"]
    return (own[0] if own else kinds[0]).__name__


def old_kind_of(value: object) -> str | None:
    """What a tensor is that is sharded, and does not say which part of the whole it is; None for everything else."""
    return None if is_dtensor(value) else kind_of(value)


def in_object(thing: object, kind: Callable[[object], str | None] = old_kind_of) -> str | None:
    """What is of a kind in a model, or among the parameters of an optimizer, with its name; None if nothing is.

    Nothing is looked for in other objects: their states say what they hold, see `in_state`.
    """
    if isinstance(thing, torch.nn.Module):
        return next(_in_module(thing, kind), None)
    if isinstance(thing, torch.optim.Optimizer):
        return next(_in_optimizer(thing, kind), None)
    return None


def in_state(state: object, name: str = "its state", kind: Callable[[object], str | None] = kind_of) -> str | None:
    """The first sharded tensor in a state, with its path, which begins with `name`; None if there is none."""
    return _in_state(state, name, set(), kind)


def check_savable(name: str, thing: object) -> None:
    """Check that an object can be saved by one rank for all."""
    found = in_object(thing)
    if found is not None:
        raise TypeError(why_refused(name, found))


def why_refused(name: str, found: str) -> str:
    """Why a checkpoint does not take what `in_object` or `in_state` has found, and what to do, in one line."""
    return f'"{name}": {found}: {_TO_SAVE}'


def _in_module(module: torch.nn.Module, kind_of_it: Callable[[object], str | None]) -> Iterator[str]:
    for name, parameter in itertools.chain(module.named_parameters(), module.named_buffers()):
        if kind := kind_of_it(parameter):
            yield f'parameter "{name}" is {kind}'
    kinds = {_MODULE} if kind_of_it is old_kind_of else {_MODULE, "FSDPModule"}
    for name, part in module.named_modules():  # parameters of it may be gathered for now
        if found := kinds & {each.__name__ for each in type(part).__mro__}:
            yield f'module "{name}" is sharded by {found.pop()}' if name else f"it is sharded by {found.pop()}"


def _in_optimizer(optimizer: torch.optim.Optimizer, kind_of_it: Callable[[object], str | None]) -> Iterator[str]:
    for number, group in enumerate(optimizer.param_groups):
        names: Sequence[str | int] = group.get("param_names") or range(len(group["params"]))
        for name, parameter in zip(names, group["params"], strict=False):
            if kind := kind_of_it(parameter):
                of_group = f" of group {number}" if isinstance(name, int) else ""
                yield f'parameter "{name}"{of_group} is {kind}'


def _in_state(state: object, path: str, seen: set[int], kind_of: Callable[[object], str | None]) -> str | None:
    if isinstance(state, torch.Tensor):
        kind = kind_of(state)
        return f"{path} is {kind}" if kind else None
    if not isinstance(state, _CONTAINERS) or id(state) in seen:
        return None
    seen.add(id(state))
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if type(value) not in _PLAIN and (found := _in_state(value, f"{path}[{key!r}]", seen, kind_of)):
            return found
    return None
