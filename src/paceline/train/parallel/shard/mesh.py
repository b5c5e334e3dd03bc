"""Which ranks share a model among themselves, and which have the same part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.contract.machine import machine_id

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from paceline.train.group.group import Group


def shard_size(shard: bool | str | int, group: Group) -> int:
    """The number of ranks that share a model, of those that have data of their own. A collective of all ranks.

    Raises:
        ValueError: the ranks cannot be divided so.
    """
    ranks, together = group.data_size, group.world_size // group.data_size
    if shard is False:
        return 1
    if shard is True:
        return ranks
    if shard == "node":
        machines = group.gather_objects(machine_id())[::together]
        counts = {machines.count(machine) for machine in machines}
        if len(counts) > 1:
            raise ValueError(
                f'shard="node" needs the same number of ranks on each machine, and here are {min(counts) * together} '
                f"and {max(counts) * together}; use shard=True, or a number that divides {ranks}"
            )
        size = counts.pop()
        if any(len(set(machines[first : first + size])) > 1 for first in range(0, ranks, size)):
            raise ValueError('shard="node" needs ranks that follow each other on a machine; use shard=True')
        return size
    size = int(shard)
    if ranks % size:
        of = f" that have data of their own, with tensor={together}," if together > 1 else ""
        raise ValueError(
            f"shard={size}: {ranks} ranks{of} cannot be divided into groups of {size}; use a number that "
            f"divides {ranks}, or shard=True"
        )
    return size


def make_mesh(size: int, group: Group) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The ranks that have other data, in groups of `size`; and those that have the same, None if none have.

    A second dimension of the former is there if there are several groups. A collective of all ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh

    kind, together = group.device.type, group.world_size // group.data_size
    shape = {"replicate": group.data_size // size, "shard": size, "tensor": together}
    names = [name for name, count in shape.items() if count > 1 or name == "shard"]
    mesh = init_device_mesh(kind, tuple(shape[name] for name in names), mesh_dim_names=tuple(names))
    if together == 1:
        return mesh, None
    data = tuple(name for name in names if name != "tensor")
    return mesh[data if len(data) > 1 else data[0]], mesh["tensor"]
