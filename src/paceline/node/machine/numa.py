"""Which cores are near a rank's GPU, read from the kernel's files; the modes are those of torchrun's `--numa-binding`.

Ranks without a GPU are assigned to the NUMA nodes in turn.

Every function takes the folders that it reads, so that a test can pass others.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from typing import TYPE_CHECKING

from paceline.contract.memory import PROC, read

from .hardware import SYS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

MODES = ("node", "socket", "exclusive", "core-complex")


class CannotBind(Exception):
    """The cores cannot be shared among the ranks like that; the message says why."""


def cores_of(
    # `node`: those of the NUMA node of its GPU. `socket`: those of the socket. `exclusive`: a share of the node's
    # physical cores that no other rank has. `core-complex`: those of the node that share one last-level cache; ranks
    # get different ones if there are enough.
    mode: str,
    ranks: int,
    devices: Sequence[str] | None,  # the GPUs of the ranks, by local rank, as entries of CUDA_VISIBLE_DEVICES
    usable: Iterable[int],  # logical cores
    *,
    proc: Path = PROC,
    sys: Path = SYS,
) -> list[set[int]]:
    """The logical cores of each rank of a machine."""
    allowed = set(usable)
    nodes = {number: cores & allowed for number, cores in _nodes(sys).items()}
    nodes = {number: cores for number, cores in nodes.items() if cores} or {0: allowed}
    mine = [_node_of(rank, devices, sorted(nodes), proc, sys) for rank in range(ranks)]
    for rank, node in enumerate(mine):
        if node not in nodes:
            raise CannotBind(f"rank {rank}'s GPU is at NUMA node {node}, of which this process may use no core")
    if mode == "node":
        return [nodes[node] for node in mine]
    if mode == "socket":
        sockets = {node: {_number(sys, core, "topology/physical_package_id") for core in nodes[node]} for node in nodes}
        return [
            set().union(*(cores for other, cores in nodes.items() if sockets[other] & sockets[node])) for node in mine
        ]
    at: dict[int, list[int]] = defaultdict(list)  # NUMA node → its ranks
    for rank, node in enumerate(mine):
        at[node].append(rank)
    split = _exclusive if mode == "exclusive" else _complexes
    found: list[set[int]] = [set() for _ in range(ranks)]
    for node, there in at.items():
        for rank, cores in zip(there, split(node, nodes[node], len(there), sys)):
            found[rank] = cores
    return found


def _exclusive(node: int, cores: set[int], ranks: int, sys: Path) -> list[set[int]]:
    """An equal share of the physical cores for each rank, the first ones one more if they do not divide."""
    physical = _grouped(cores, lambda core: _listed(read(_cpu(sys, core) / "topology" / "thread_siblings_list")))
    if len(physical) < ranks:
        raise CannotBind(f"{ranks} ranks share NUMA node {node}, which has {len(physical)} physical cores to use")
    share, more = divmod(len(physical), ranks)
    begins = [rank * share + min(rank, more) for rank in range(ranks + 1)]
    return [set().union(*physical[begin:end]) for begin, end in zip(begins, begins[1:])]


def _complexes(node: int, cores: set[int], ranks: int, sys: Path) -> list[set[int]]:
    """The cores that share a last-level cache: the largest groups first, and again from the first one."""
    groups = _grouped(cores, lambda core: _sharing_cache(sys, core))
    groups.sort(key=lambda group: (-len(group), min(group)))
    return [groups[rank % len(groups)] for rank in range(ranks)]


def _grouped(cores: set[int], sharing: Callable[[int], set[int]]) -> list[set[int]]:
    """Cores in groups of those that share something, in the order of the lowest of each."""
    groups: dict[int, set[int]] = defaultdict(set)
    for core in sorted(cores):
        groups[min(sharing(core) | {core})].add(core)
    return [groups[key] for key in sorted(groups)]


def _sharing_cache(sys: Path, core: int) -> set[int]:
    """The cores that share a core's cache of the highest level."""
    caches = {}
    for index in sorted((_cpu(sys, core) / "cache").glob("index[0-9]*")):
        if read(index / "type") in ("Unified", "Data"):
            caches[int(read(index / "level") or 0)] = _listed(read(index / "shared_cpu_list"))
    return caches[max(caches)] if caches else set()


def _node_of(rank: int, devices: Sequence[str] | None, nodes: list[int], proc: Path, sys: Path) -> int:
    """The NUMA node that a rank is near to."""
    if devices:
        bus = _bus_of(devices[rank % len(devices)], proc)
        number = read(sys / "bus" / "pci" / "devices" / bus / "numa_node") if bus else ""
        if number.isdecimal():  # "-1": the firmware does not say
            return int(number)
    return nodes[rank % len(nodes)]


def _bus_of(device: str, proc: Path) -> str:
    """The address on the PCI bus of an NVIDIA GPU, "" if that is unknown."""
    folders = sorted((proc / "driver" / "nvidia" / "gpus").glob("*"))
    for number, folder in enumerate(folders):
        uuid = re.search(r"^GPU UUID:\s*(\S+)$", read(folder / "information"), re.MULTILINE)
        if device == str(number) or (uuid is not None and device.startswith("GPU-") and uuid[1].startswith(device)):
            return folder.name.lower()
    return ""


def _nodes(sys: Path) -> dict[int, set[int]]:
    """The cores of each NUMA node."""
    folders = (sys / "devices" / "system" / "node").glob("node[0-9]*")
    return {int(folder.name[4:]): _listed(read(folder / "cpulist")) for folder in folders}


def _cpu(sys: Path, core: int) -> Path:
    return sys / "devices" / "system" / "cpu" / f"cpu{core}"


def _number(sys: Path, core: int, name: str) -> str:
    return read(_cpu(sys, core) / name)


def _listed(text: str) -> set[int]:
    """The numbers of a list such as `0-3,8`."""
    numbers: set[int] = set()
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", text):
        numbers.update(range(int(low), int(high or low) + 1))
    return numbers


def bind(mode: str, local_rank: int, ranks: int, devices: Sequence[str] | None) -> None:
    """Bind this process, and all that it starts, to the cores near a rank's GPU."""
    cores = cores_of(mode, ranks, devices, os.sched_getaffinity(0))[local_rank]
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise CannotBind(f"cores {sorted(cores)}: {error.strerror}") from None
