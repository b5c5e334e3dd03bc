"""The ways from this rank to the others: memory or a process group within a machine, a process group between them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from paceline.contract.machine import machine_id
from paceline.train.group.shared_memory import GATHERS, SharedMemory, SharedMemoryError
from paceline.train.parallel.sync.wires.wire import all_reduce, ring_bytes

from .fast_groups import measured_groups

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta
    from typing import TypeAlias

    import torch

    from paceline.train.group.group import Group
    from paceline.train.group.shared_memory import SharedMemory
    from paceline.train.parallel.sync.options import EveryStep

    Within: TypeAlias = "SharedMemory | WithinGroup | Nested"  # how the ranks of a group sum among themselves


# -- sums within a machine or group ------------------------------------------------------------------------------------
# Sums among ranks that are near each other: on one machine, or on machines with fast links.


class WithinGroup:
    """Sums among ranks by a process group: on GPUs, and where ranks do not share memory."""

    def __init__(self, group: dist.ProcessGroup, first: int) -> None:
        self.sent = 0
        self._group, self._first = group, first

    def all_reduce(self, tensor: torch.Tensor, divisor: float = 1.0) -> None:
        """Sum over the ranks, in place, and divide."""
        all_reduce(tensor, self._group)
        tensor /= divisor
        self.sent += ring_bytes([tensor], dist.get_world_size(self._group))

    def reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks, in place on the first of them."""
        if tensor.device.type == "cpu":
            all_reduce(tensor, self._group)  # in the order of ranks
            self.sent += ring_bytes([tensor], dist.get_world_size(self._group))
            return
        dist.reduce(tensor, self._first, group=self._group)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy the tensor of the first of them to the others."""
        dist.broadcast(tensor, self._first, group=self._group)

    def close(self) -> None:
        """Give back what it holds."""


class Nested:
    """Sums on each machine first, and then among these machines."""

    def __init__(self, inner: Within, outer: Within | None) -> None:
        self._inner, self._outer = inner, outer

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent by the network."""
        return self._inner.sent + (0 if self._outer is None else self._outer.sent)

    def all_reduce(self, tensor: torch.Tensor, divisor: float = 1.0) -> None:
        """Sum over the ranks, in place, and divide."""
        self._inner.reduce(tensor)
        if self._outer is not None:
            self._outer.all_reduce(tensor, divisor)
        self._inner.broadcast(tensor)

    def reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks, in place on the first of them."""
        self._inner.reduce(tensor)
        if self._outer is not None:
            self._outer.reduce(tensor)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy the tensor of the first of them to the others."""
        if self._outer is not None:
            self._outer.broadcast(tensor)
        self._inner.broadcast(tensor)

    def close(self) -> None:
        """Give back what it holds."""
        self._inner.close()


# -- routes ------------------------------------------------------------------------------------------------------------


log = logging.getLogger("paceline")


@dataclass(frozen=True)
class Route:
    """How a tensor of this rank gets to all others.

    Attributes:
        within: to the other ranks of the same machine, or group; None if there are none.
        between: from this group to the others; None on ranks that leave that to another one, and if there is one group
            only.
        machines: number of groups that exchange as one, such as machines.
        neighbours: number of ranks of this group, with this one.
    """

    within: Within | None
    between: dist.ProcessGroup | None
    machines: int
    neighbours: int


def make_groups(group: Group, options: EveryStep) -> list[list[int]]:
    """The ranks that sum among themselves first. A collective of all ranks."""
    if isinstance(options.hierarchical, tuple):
        groups = [list(ranks) for ranks in options.hierarchical]
        if sorted(rank for ranks in groups for rank in ranks) != list(range(group.world_size)) or not all(groups):
            raise ValueError(
                f"hierarchical={options.hierarchical!r} must name each of the ranks 0 to {group.world_size - 1} once"
            )
        return groups
    if options.hierarchical is False or (options.hierarchical == "auto" and group.device.type != "cpu"):
        return [[rank] for rank in range(group.world_size)]
    machines = _by_machine(range(group.world_size), group.gather_objects(machine_id()))
    return measured_groups(group, machines) if options.hierarchical == "measured" else machines


def _by_machine(ranks: Sequence[int], names: Sequence[str]) -> list[list[int]]:
    """Some ranks, by machine; `names` are those of the machines of all ranks."""
    return [[rank for rank in ranks if names[rank] == each] for each in dict.fromkeys(names[rank] for rank in ranks)]


def make_route(group: Group, groups: Sequence[Sequence[int]]) -> Route:
    """The route of this rank. A collective of all ranks."""
    mine = next(ranks for ranks in groups if group.rank in ranks)
    between: dist.ProcessGroup | None = None
    if len(groups) > 1:
        leaders = [ranks[0] for ranks in groups]
        made = dist.new_group(leaders, timeout=_timeout(group))
        between = made if group.rank in leaders else None
    return Route(_within(group, groups, mine), between, len(groups), len(mine))


def _within(group: Group, groups: Sequence[Sequence[int]], mine: Sequence[int]) -> Within | None:
    if all(len(ranks) == 1 for ranks in groups):
        return None
    if group.device.type != "cpu":
        made = [dist.new_group(list(ranks), timeout=_timeout(group)) for ranks in groups]
        return WithinGroup(made[groups.index(mine)], mine[0]) if len(mine) > 1 else None
    names = group.gather_objects(machine_id())
    machines = [each for ranks in groups for each in _by_machine(ranks, names)]
    if len(machines) == len(groups):
        return _shared_memory(group, groups, mine)
    here = next(ranks for ranks in machines if group.rank in ranks)
    inner = _shared_memory(group, machines, here) if any(len(ranks) > 1 for ranks in machines) else None
    first = [[each[0] for each in _by_machine(ranks, names)] for ranks in groups]
    between = [dist.new_group(ranks, timeout=_timeout(group)) for ranks in first]
    number = groups.index(mine)
    if len(first[number]) == 1:
        return inner
    outer = WithinGroup(between[number], mine[0]) if group.rank in first[number] else None
    return outer if inner is None else Nested(inner, outer)


def _shared_memory(group: Group, groups: Sequence[Sequence[int]], mine: Sequence[int]) -> Within | None:
    """Shared memory, or process groups for all ranks if some cannot share theirs."""

    def gather(text: str) -> list[str]:
        texts = group.gather_objects(text)
        return [texts[rank] for rank in mine]

    memory: SharedMemory | None = None
    why = ""
    if len(mine) == 1:
        for _ in range(GATHERS):
            gather("")
    else:
        try:
            memory = SharedMemory(mine.index(group.rank), len(mine), gather, _timeout(group).total_seconds())
        except SharedMemoryError as error:
            why = str(error)
    problems = [problem for problem in group.gather_objects(why) if problem]
    if not problems:
        return memory
    if group.is_main:
        log.warning(
            "the ranks of each machine exchange gradients by sockets: they cannot share memory: %s", problems[0]
        )
    if memory is not None:
        memory.close()
    made = [dist.new_group(list(ranks), timeout=_timeout(group)) for ranks in groups]
    return WithinGroup(made[groups.index(mine)], mine[0]) if len(mine) > 1 else None


def _timeout(group: Group) -> timedelta:
    """How long collectives wait for other ranks."""
    found: timedelta = dist.distributed_c10d._get_default_group()._get_backend(group.device).options._timeout
    return found
