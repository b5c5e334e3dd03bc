"""How the script itself has divided a model before `Run.setup`: by `fully_shard`, `parallelize_module`, or both."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from paceline.train.group.sharded import is_dtensor, is_fully_sharded, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from paceline.train.group.group import Group

_OVER = ([False], [True, False])  # whether dimensions of a mesh of `fully_shard` have copies


class ByScript(NamedTuple):
    """How the script itself has divided a model.

    Attributes:
        data: the ranks that `fully_shard` has sharded it over; they have other data. None if it has not.
        layers: the ranks that compute its layers together, as `parallelize_module` has divided them; None if it has
            not. They have the same data.
    """

    data: DeviceMesh | None = None
    layers: dist.ProcessGroup | None = None

    @property
    def together(self) -> int:
        """How many ranks have the same data."""
        return 1 if self.layers is None else dist.get_world_size(self.layers)

    def spread_numbers(self, module: torch.nn.Module, data: DeviceMesh) -> None:
        """Give all ranks that have the same part of a model the same numbers. A collective of all ranks.

        Args:
            module: the model.
            data: the ranks that have other data.
        """
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            if not is_dtensor(tensor):
                continue
            part = tensor.to_local().detach()
            sent = part.to(data.device_type)  # `fully_shard` may keep it on the CPU
            for dim in range(data.ndim if self.data is None else data.ndim - 1):  # the last one shards
                dist.broadcast(sent, group=data.get_group(dim), group_src=0)
            if self.data is not None and self.layers is not None and tensor.device_mesh.ndim == data.ndim:
                dist.broadcast(sent, group=self.layers, group_src=0)  # a layer that is not divided
            part.copy_(sent)


def by_script(module: torch.nn.Module, group: Group) -> ByScript:
    """How the script itself has divided a model.

    Raises:
        ValueError: not over all ranks, or in a way that is not known; or only a part of it is sharded.
    """
    data = _sharded_over(module) if is_fully_sharded(module) else None
    shape = () if data is None else tuple(data.shape)
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if not is_dtensor(tensor):
            continue  # it is the same on all ranks
        mesh = tensor.device_mesh
        is_divided = mesh.ndim > len(shape)
        if is_divided and mesh.mesh_dim_names is None:
            raise ValueError(
                f"{name} of {name_of(module)} is divided over a mesh without names: give it one, as in "
                'init_device_mesh(…, mesh_dim_names=("tensor",))'
            )
        if is_divided and (coordinate := mesh.get_coordinate()) is not None:
            found[tuple(mesh.mesh[tuple(coordinate[:-1])].tolist())] = mesh.get_group(mesh.ndim - 1)
        if not _is_known(tensor, shape) or len(found) > 1:
            _refuse(name, tensor, module, group)
    [[ranks, layers]] = found.items() or [((group.rank,), None)]
    first = group.rank // len(ranks) * len(ranks)
    if ranks != tuple(range(first, first + len(ranks))) or (data and data.size() * len(ranks) != group.world_size):
        raise ValueError(
            f"layers of {name_of(module)} are divided over ranks {', '.join(map(str, ranks))}, and sharded over "
            f"{data.size() if data else 1} such groups, of {group.world_size} ranks; let all ranks take part, and make "
            "ranks that follow each other compute layers together: the last dimension of the mesh"
        )
    return ByScript(data, layers)


def fsdp_groups(module: torch.nn.Module) -> Iterator[Any]:
    """What torch keeps for the parameters of each unit of `fully_shard`; it has no public name."""
    for part in module.modules():
        state: Any = part._get_fsdp_state() if hasattr(part, "_get_fsdp_state") else None  # type: ignore[operator]
        yield from state._fsdp_param_groups if state is not None else ()


def _sharded_over(module: torch.nn.Module) -> DeviceMesh:
    kind = name_of(module)
    if not any(each.__name__ == "FSDPModule" for each in type(module).__mro__):
        raise ValueError(f"only parts of {kind} are sharded by fully_shard: call fully_shard(model) as well")
    for each in fsdp_groups(module):
        mesh: DeviceMesh = each.mesh_info.mesh
        return mesh
    raise ValueError(f"{kind} is sharded by fully_shard, and no parameter of it is")


def _is_known(tensor: DTensor, sharded: tuple[int, ...]) -> bool:
    """Whether a tensor is sharded over a mesh of this shape, and divided over at most one dimension besides."""
    mesh, over = tensor.device_mesh, [each.is_replicate() for each in tensor.placements[: len(sharded)]]
    return (
        mesh.get_coordinate() is not None
        and len(sharded) <= mesh.ndim <= len(sharded) + 1
        and tuple(mesh.shape[: len(sharded)]) == sharded
        and (not sharded or over in _OVER)
    )


def _refuse(name: str, tensor: DTensor, module: torch.nn.Module, group: Group) -> None:
    shape = " x ".join(map(str, tensor.device_mesh.shape))
    raise ValueError(
        f"{name} of {name_of(module)} is divided over a mesh of {shape} of {group.world_size} ranks as "
        f"{tensor.placements}; run.setup takes models that are divided by fully_shard over one mesh of all ranks, by "
        "parallelize_module over another dimension of it, or by both"
    )
