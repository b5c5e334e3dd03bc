"""The norm of all gradients of a rank's models, of which ranks may have parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.train.group.sharded import is_dtensor

from .shard.layout import local_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.train.group.group import Group

    from .pipeline.stages import Stages


def clip(
    parameters: Sequence[torch.Tensor], most: float, group: Group, *, scales: bool, stages: Sequence[Stages] = ()
) -> torch.Tensor:
    """Return the 2-norm of all gradients as if they were one vector, and scale them down to `most` if it is more.

    It is the same on all ranks, and a collective if gradients are sharded. torch's own raises if they are sharded over
    several meshes, or sharded and whole ones come together (pytorch#180346).
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not (stages or any(map(is_dtensor, gradients))):
        if scales:
            return torch.nn.utils.clip_grad_norm_(parameters, most)
        return torch.nn.utils.get_total_norm(gradients)
    norm = _total_norm([p for p in parameters if p.grad is not None], group, stages)
    if scales:
        factor = torch.clamp(most / (norm + 1e-6), max=1.0)
        for each in local_tensors(gradients):
            each.mul_(factor.to(each.device))
    return norm


def _total_norm(parameters: Sequence[torch.Tensor], group: Group, stages: Sequence[Stages]) -> torch.Tensor:
    squares: dict[tuple[Any, ...], torch.Tensor] = {}  # by the mesh, and its dimensions along which ranks differ
    dtype = torch.float64 if any(p.dtype is torch.float64 for p in parameters) else torch.float32
    here = torch.zeros((), dtype=dtype, device=group.device)
    apart = [here.clone() for _ in stages]  # of what other ranks of a pipeline do not have
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for parameter, gradient, own in zip(parameters, gradients, local_tensors(gradients), strict=True):
        key: tuple[Any, ...] = ()
        if is_dtensor(gradient):
            placements = enumerate(gradient.placements)
            key = gradient.device_mesh, *(number for number, each in placements if not each.is_replicate())
        square = torch.linalg.vector_norm(own, dtype=dtype).to(group.device) ** 2
        for number, each in enumerate(stages):
            if each.has_one(parameter):
                apart[number] += square
                break
        else:
            squares[key] = squares[key] + square if key in squares else square
    with group.guard:
        for each, square in zip(stages, apart, strict=True):
            dist.all_reduce(square, group=each.forward)
        for (mesh, *numbers), square in ((key, square) for key, square in squares.items() if key):
            for number in numbers:
                dist.all_reduce(square, group=mesh.get_group(number))
    return torch.stack([here, *squares.values(), *apart]).sum().sqrt()
