"""Giving all ranks the same parameters, optimizer states and objects."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from paceline.contract.functions import dumps
from paceline.horovod.common.process import engine, rank
from paceline.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.train.group import sharded
from paceline.train.torch_types import StateDict

from .mpi_ops import allgather, broadcast_, broadcast_async_, synchronize

T = TypeVar("T")


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Give all ranks the root's parameters, in place.

    Args:
        params: a state dict, or a list of parameters or of their names and them (`model.named_parameters()`). What is
            not a tensor stays as it is.
        root_rank: the global rank whose parameters they are.
        process_set: who takes part.

    Raises:
        TypeError: a parameter is a DTensor.
        ValueError: `params` is something else.
        HorovodInternalError: the ranks have different parameters, or a rank is gone.
    """
    if isinstance(params, Mapping):
        named: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, Tensor)):
        named = [one if isinstance(one, tuple) else (None, one) for one in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    begins_anew(process_set)
    handles = [
        broadcast_async_(tensor, root_rank, name and f"parameters.{name}", process_set)
        for name, tensor in named
        if isinstance(tensor, Tensor)
    ]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give all ranks the root's state of an optimizer: learning rates and other options, momenta, step counts.

    Any optimizer will do, with or without state; no step is taken.

    Args:
        optimizer: of torch, or a `DistributedOptimizer`.
        root_rank: the global rank whose state it is.
        model: accepted; not needed.
        process_set: who takes part.

    Raises:
        HorovodInternalError: a rank is gone.
        TypeError: its parameters are sharded.
    """
    check_whole(f"this {type(optimizer).__name__}", optimizer)
    begins_anew(process_set)
    is_root = rank() == root_rank
    state = optimizer.state_dict() if is_root else None
    state = broadcast_object(state, root_rank, "optimizer_state", process_set)
    if not is_root:
        load_as_it_is(optimizer, cast("StateDict", state))


def load_as_it_is(optimizer: torch.optim.Optimizer, state: StateDict) -> None:
    """Load a state of an optimizer whose groups a scheduler may have, without a change of its types."""
    groups = optimizer.param_groups
    # The base class loads it: a DistributedOptimizer would forget what its hooks have started.
    torch.optim.Optimizer.load_state_dict(optimizer, state)
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.clear()
        group.update(loaded)
    optimizer.param_groups = groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    for number, kept in state["state"].items():
        for name, value in kept.items() if isinstance(number, int) else ():
            parameter = parameters[number]
            if isinstance(value, Tensor) and optimizer.state[parameter][name].dtype != value.dtype:
                optimizer.state[parameter][name] = value.to(parameter.device, copy=True)


def begins_anew(process_set: ProcessSet) -> None:
    """Compare ranks anew: they are about to have what the root has."""
    if process_set.process_set_id == 0:
        engine().replicas.broadcast()


def check_whole(name: str, thing: object) -> None:
    """Check that a rank's model, optimizer or state can be given to the other ranks."""
    found = sharded.in_object(thing, sharded.kind_of) or sharded.in_state(thing, name)
    if found is not None:
        raise TypeError(f"{name} is sharded, and Horovod gives all ranks one rank's state: {found}")


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """Return the object of the root; it is pickled, by cloudpickle where that is installed.

    Args:
        obj: passed on the root.
        root_rank: the global rank whose object it is.
        name: of the operation.
        process_set: who takes part.

    Raises:
        HorovodInternalError: a rank is gone.
    """
    named = name is not None
    is_root = rank() == root_rank
    data = _packed(obj) if is_root else None
    size = torch.tensor([len(data) if data is not None else 0])
    broadcast_(size, root_rank, f"{name}.sz" if named else None, process_set)
    if data is None:
        data = torch.empty(int(size), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.t" if named else None, process_set)
    return obj if is_root else cast("T", _unpacked(data))


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """Return the objects of all ranks, in rank order; they are pickled, by cloudpickle where that is installed.

    Raises:
        HorovodInternalError: a rank is gone.
    """
    named = name is not None
    data = _packed(obj)
    sizes = allgather(torch.tensor([len(data)]), f"{name}.sz" if named else None, process_set)
    gathered = allgather(data, f"{name}.t" if named else None, process_set)
    return [cast("T", _unpacked(part)) for part in torch.split(gathered, sizes.tolist())]


def _packed(obj: object) -> Tensor:
    return torch.frombuffer(bytearray(dumps(obj)), dtype=torch.uint8)


def _unpacked(data: Tensor) -> object:
    return pickle.loads(data.numpy().tobytes())
