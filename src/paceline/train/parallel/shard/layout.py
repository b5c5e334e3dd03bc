"""Which part of a tensor a rank has: its place in the whole, and tensors that are cut in the same way."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from paceline.train.group.sharded import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

_cuts: weakref.WeakKeyDictionary[torch.optim.Optimizer, Callable[[torch.Tensor], DTensor | None]]
_cuts = weakref.WeakKeyDictionary()


def place_of(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's part of a tensor, and where it begins in each dimension."""
    return place_in(tensor.shape, tensor.device_mesh, tensor.placements)


def place_in(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same for any tensor of this shape that is cut in this way."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if mesh.get_coordinate() is None:  # other ranks have it
        return (0,) * len(shape), (0,) * len(shape)
    part, begin = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(part), tuple(begin)


def part_of(whole: torch.Tensor, like: DTensor) -> DTensor:
    """This rank's part of a whole tensor, cut like another one of its shape, on the device of that one."""
    shape, begin = place_of(like)
    part = whole
    for dim, (length, first) in enumerate(zip(shape, begin, strict=True)):
        part = part.narrow(dim, first if length else 0, length)
    return from_part(part.detach().clone(memory_format=torch.contiguous_format), like)


def from_part(part: torch.Tensor, like: DTensor) -> DTensor:
    """The tensor of which this rank has `part`, cut like another one."""
    if like.device_mesh.get_coordinate() is None:
        return elsewhere(like.shape, part.dtype, like.device_mesh, like.placements)
    part = part.to(like.device)
    if part.dtype != like.dtype:
        return cut(part, like, like.device_mesh, like.placements)
    from torch.distributed.tensor import DTensor

    return DTensor(part, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def elsewhere(shape: torch.Size, dtype: torch.dtype, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """A tensor that only ranks of a mesh have to which this one does not belong."""
    whole = torch.empty(shape, dtype=dtype, device="meta")
    made = cut(torch.empty(0 if shape else (), dtype=dtype), whole, mesh, placements)
    made.__reduce_ex__ = _not_here  # type: ignore[method-assign]
    return made


def _not_here(_: Any) -> NoReturn:
    """In place of `__reduce_ex__`: `torch.save` would write nothing for it."""
    raise RuntimeError(
        "this state has tensors that other ranks have, so a file of it would lack them: take a checkpoint (run.save), "
        "and write the whole model with paceline checkpoint export"
    )


def cut(part: torch.Tensor, like: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """A tensor with the shape of another one, of which this rank has `part`.

    This is what `DTensor.from_local` makes, which takes longer: a state has many of them.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(mesh, placements, TensorMeta(like.shape, like.stride(), part.dtype))
    return DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def spread(state: MutableMapping[str, Any] | Mapping[str, Any], shards: Mapping[str, DTensor]) -> None:
    """Replace whole tensors of a state, in place, by this rank's parts."""
    for name, like in shards.items():
        value = state.get(name)
        if isinstance(value, torch.Tensor) and not is_dtensor(value) and value.shape == like.shape:
            state[name] = part_of(value, like)  # type: ignore[index]


def keeps_parts(optimizer: torch.optim.Optimizer, like: Callable[[torch.Tensor], DTensor | None]) -> None:
    """Note that an optimizer keeps parts for parameters that are whole: `like` says how they are cut."""
    _cuts[optimizer] = like


def likes_of(thing: Any) -> Callable[[tuple[Any, ...], torch.Size], DTensor | None]:
    """Which tensor of an object the tensor at a path of its state is cut like, given its shape; None for a whole one.

    What an optimizer keeps for a parameter, such as a running mean, is cut like that if it has its shape.
    """
    if isinstance(thing, torch.optim.Optimizer):
        trained = [parameter for group in thing.param_groups for parameter in group["params"]]
        cut = _cuts.get(thing)

        def of_parameter(path: tuple[Any, ...], shape: torch.Size) -> DTensor | None:
            if path[0] != "state" or not isinstance(path[1], int) or path[1] >= len(trained):
                return None
            like = trained[path[1]] if cut is None else cut(trained[path[1]])
            return like if is_dtensor(like) and like.shape == shape else None

        return of_parameter
    state = thing.state_dict()

    def at(path: tuple[Any, ...], shape: torch.Size) -> DTensor | None:
        value = state
        for key in path:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                return None
        return value if is_dtensor(value) and value.shape == shape else None

    return at


def spread_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Take this rank's part of what an optimizer keeps whole for sharded parameters."""
    for parameter, kept in optimizer.state.items():
        if is_dtensor(parameter) and isinstance(kept, dict):
            spread(kept, dict.fromkeys(kept, parameter))


def local_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's parts of tensors, which share their memory."""
    return [each.to_local() if is_dtensor(each) else each for each in tensors]
