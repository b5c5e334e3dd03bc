"""Makes the synchroniser of a model, as its user's options say."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from paceline.contract.machine import machine_id

from .methods.auto import AutoExchange, say
from .methods.averaging import Averaging
from .methods.diloco import DiLoCoExchange, deal
from .methods.every_step import EveryStepExchange
from .methods.local_sgd import LocalExchange
from .options import AllReduce, AutoSync, DiLoCo, EveryStep, LocalSGD, PowerSGD, TopK, name_of
from .route import make_groups, make_route
from .wires import powersgd, topk
from .wires.int8 import Int4, Int8
from .wires.wire import Cast, Exact

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from paceline.train.group.group import Group

    from .methods.synchroniser import Synchroniser
    from .options import Sync
    from .route import Route
    from .wires.wire import Wire

_BUCKET_MB = 4  # in shared memory
_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def make_synchroniser(options: Sync, group: Group, module: torch.nn.Module) -> Synchroniser | None:
    """Make it; None if DistributedDataParallel's own exchange is the best. A collective of all ranks."""
    if isinstance(options, AutoSync) and len(set(group.gather_objects(machine_id()))) == 1:
        say(group, "allreduce, since all ranks are on one machine")
        options = AllReduce()
    made = _made(options, group, module)
    if made is not None:
        made.method = made.method or name_of(options)
    return made


def best_bucket_mb(options: Sync, group: Group) -> int | None:
    """Megabytes of gradients that are best exchanged at once, None for torch's choice; a collective of all ranks."""
    if not isinstance(options, AllReduce) or not options.is_exact or group.device.type != "cpu":
        return None
    shares_memory = (
        options.hierarchical is not False and len(set(group.gather_objects(machine_id()))) < group.world_size
    )
    return _BUCKET_MB if shares_memory else None


def _made(options: Sync, group: Group, module: torch.nn.Module) -> Synchroniser | None:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if isinstance(options, AutoSync):
        route = make_route(group, make_groups(group, AllReduce()))
        return AutoExchange(options, group, route, functools.partial(_wire, parameters=parameters), parameters)
    if isinstance(options, LocalSGD):
        every_step = AllReduce(hierarchical=options.hierarchical or "auto")
        return LocalExchange(
            options, module, _every_step(every_step, group, make_groups(group, every_step), parameters)
        )
    if isinstance(options, DiLoCo):
        return _diloco(options, group, module)
    assert isinstance(options, EveryStep)
    groups = make_groups(group, options)
    is_flat = len(groups) == group.world_size
    is_ordered = group.world_size == 2 or group.device.type != "cpu"  # see `wire.all_reduce`
    if options == AllReduce(hierarchical=options.hierarchical) and is_flat and is_ordered:
        return None
    return _every_step(options, group, groups, parameters)


def _diloco(options: DiLoCo, group: Group, module: torch.nn.Module) -> Synchroniser:
    for name, parameter in module.named_parameters():
        if options.wire != "fp32" and not parameter.is_floating_point():
            raise ValueError(
                f"the parameter {name} of type {parameter.dtype} cannot be sent as {options.wire}; use "
                "DiLoCo(wire='fp32')" + ("" if parameter.is_complex() else ", or make it a buffer")
            )
    fragments = deal(module, options.fragments)
    route = make_route(group, make_groups(group, AllReduce()))
    wire = None if route.between is None else _outer_wire(options, route.between)
    return DiLoCoExchange(options, module, fragments, Averaging(route, wire, group.world_size))


def _outer_wire(options: DiLoCo, group: dist.ProcessGroup) -> Wire:
    if options.wire == "fp16":
        return Cast(group, torch.float16)
    if options.wire == "int8":
        return Int8(group)
    return Int4(group) if options.wire == "int4" else Exact(group)


def _every_step(
    options: EveryStep, group: Group, groups: Sequence[Sequence[int]], parameters: Sequence[torch.nn.Parameter]
) -> EveryStepExchange:
    ways: list[tuple[Route, Wire | None]] = []
    for _ in range(options.communicators):
        route = make_route(group, groups)
        ways.append((route, None if route.between is None else _wire(options, route.between, parameters)))
    return EveryStepExchange(ways, group.world_size, parameters)


def _wire(options: EveryStep, group: dist.ProcessGroup, parameters: Sequence[torch.nn.Parameter]) -> Wire:
    if isinstance(options, PowerSGD):
        return powersgd.PowerSGD(group, [each.shape for each in parameters], options.rank, options.warmup)
    if isinstance(options, TopK):
        return topk.TopK(group, options.fraction)
    assert isinstance(options, AllReduce)
    if options.wire in _TYPES:
        return Cast(group, _TYPES[options.wire])
    return Int8(group) if options.wire == "int8" else Exact(group)
