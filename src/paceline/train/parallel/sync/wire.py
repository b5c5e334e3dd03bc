"""How gradients are sent between machines: as they are, or in fewer bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .pieces import all_gather, all_to_all

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HALVES = (torch.float16, torch.bfloat16)  # summed as float32


class Wire(ABC):
    """Sums tensors over the ranks of a process group.

    Args:
        group: the ranks.

    Attributes:
        sent: bytes that this rank has sent, by the method's formula.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.sent = group, 0
        self.ranks = dist.get_world_size(group)

    @abstractmethod
    def sum(self, tensor: torch.Tensor, keys: Sequence[tuple[int, int]], step: int) -> None:
        """Sum a contiguous floating-point tensor over the ranks, in place.

        Args:
            tensor: of one dimension; gradients, one after the other.
            keys: of each gradient the number of its parameter, and of its elements.
            step: number of steps before.
        """

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps between steps."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most keep nothing
        """Go on with what this rank has kept."""


class Exact(Wire):
    """Sends gradients as they are: 2 (K - 1) / K of their bytes per rank, with K ranks."""

    def sum(self, tensor: torch.Tensor, keys: Sequence[tuple[int, int]], step: int) -> None:
        """See `Wire.sum`."""
        all_reduce(tensor, self.group)
        self.sent += ring_bytes([tensor], self.ranks)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum a tensor over ranks, in place; on the CPU in the order of ranks.

    gloo sums in an order that depends on the place of a value in the tensor. Buckets of gradients differ between the
    first step of a process and later ones, so the sums of a resumed run would have other bits.
    """
    ranks = dist.get_world_size(group)
    if ranks <= 2 or tensor.device.type != "cpu":
        dist.all_reduce(tensor, group=group)
        return
    parts = _shares(tensor, tensor.dtype, ranks)
    own = all_to_all(parts, group).view(ranks, -1)
    total = sum_in_order(own.float()).to(own.dtype) if own.dtype in HALVES else sum_in_order(own)
    tensor.copy_(all_gather(total, group)[: tensor.numel()])


def ring_bytes(tensors: Sequence[torch.Tensor], ranks: int) -> int:
    """What each of some ranks sends when they sum tensors."""
    return 2 * (ranks - 1) * sum(each.numel() * each.element_size() for each in tensors) // ranks


def _shares(tensor: torch.Tensor, dtype: torch.dtype, ranks: int) -> torch.Tensor:
    """A tensor, lengthened so that each rank has a share of the same size."""
    parts = torch.zeros(-(-tensor.numel() // ranks) * ranks, dtype=dtype, device=tensor.device)
    parts[: tensor.numel()] = tensor
    return parts


def sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, always with the same bits."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class Shared(Wire):
    """Sums in shares: each rank sums one share of what all have sent it, in fp32, and sends the sum to all.

    Both ways gradients are in fewer bits. Sums are taken in the order of ranks, so every run gets the same.
    """

    def sum(self, tensor: torch.Tensor, keys: Sequence[tuple[int, int]], step: int) -> None:
        """See `Wire.sum`."""
        mine = self.recode(all_to_all(self.encode(tensor, keys), self.group))
        self.decode(all_gather(mine, self.group), tensor, keys)
        self.sent += 2 * (self.ranks - 1) * mine.numel() * mine.element_size()

    @abstractmethod
    def encode(self, tensor: torch.Tensor, keys: Sequence[tuple[int, int]]) -> torch.Tensor:
        """A tensor as it is sent, in one share of equal size per rank."""

    @abstractmethod
    def recode(self, received: torch.Tensor) -> torch.Tensor:
        """The sum, as it is sent, of this rank's share of all ranks."""

    @abstractmethod
    def decode(self, sums: torch.Tensor, out: torch.Tensor, keys: Sequence[tuple[int, int]]) -> None:
        """Write the sums of all shares into a tensor."""


class Cast(Shared):
    """Sends gradients in 16 bits: 2 (K - 1) / K * 2 bytes per element and rank, with K ranks."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        super().__init__(group)
        self._dtype = dtype

    def encode(self, tensor: torch.Tensor, keys: Sequence[tuple[int, int]]) -> torch.Tensor:
        """See `Shared.encode`."""
        return _shares(tensor, self._dtype, self.ranks).view(torch.uint8)

    def recode(self, received: torch.Tensor) -> torch.Tensor:
        """See `Shared.recode`."""
        parts = received.view(self._dtype).view(self.ranks, -1)
        return sum_in_order(parts.float()).to(self._dtype).view(torch.uint8)

    def decode(self, sums: torch.Tensor, out: torch.Tensor, keys: Sequence[tuple[int, int]]) -> None:
        """See `Shared.decode`."""
        out.copy_(sums.view(self._dtype)[: out.numel()])
