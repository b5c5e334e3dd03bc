"""Sums among ranks that are near each other: on one machine, or on machines with fast links."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from paceline.train.parallel.sync.wires.wire import all_reduce, ring_bytes

if TYPE_CHECKING:
    from typing import TypeAlias

    import torch

    from paceline.train.group.shared_memory import SharedMemory

    Within: TypeAlias = "SharedMemory | WithinGroup | Nested"  # how the ranks of a group sum among themselves


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
