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

    Attributes:
        sent: bytes that this rank has sent, by the method's formula.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.sent = group, 0
        self.ranks = dist.get_world_size(group)

    @abstractmethod
    def sum(self, tensor: torch.Tensor, keys: Sequence[tuple[int, int]], step: int) -> None:
        """Sum a contiguous floating-point tensor over the ranks, in place."""

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps between steps."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most keep nothing
        """Go on with what this rank has kept."""


class Exact(Wire):
    """Sends gradients as they are: 2 (K - 1) / K of their bytes per rank, with K ranks."""

    def sum(self, tensor: torch.Tensor, keys: Sequence[tuple[int, int]], step: int) -> None:
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
    total = _sum(own).to(own.dtype)
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


def sum_sent_as(tensors: Sequence[tuple[torch.Tensor, torch.dtype]], group: dist.ProcessGroup) -> int:
    """Sum tensors over ranks in place, in the order of ranks, all in one exchange."""
    ranks = dist.get_world_size(group)
    shares = 1 if ranks == 2 else ranks  # two ranks send each other everything: as much as in shares, but at once
    rows = [_shares(each, dtype, shares).view(shares, -1).view(torch.uint8) for each, dtype in tensors]
    message = (torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]).view(-1)
    widths = [row.shape[1] for row in rows]

    def parts(received: torch.Tensor) -> list[torch.Tensor]:
        """What came of each tensor, a row per rank, in the type in which it was sent."""
        columns = torch.split(received.view(ranks, -1), widths, dim=1)
        return [each.contiguous().view(dtype) for each, (_, dtype) in zip(columns, tensors, strict=True)]

    if shares == 1:
        for (tensor, _), received in zip(tensors, parts(all_gather(message, group)), strict=True):
            tensor.copy_(_sum(received))
        return message.numel()
    sums = [_sum(each).to(each.dtype).view(torch.uint8) for each in parts(all_to_all(message, group))]
    mine = torch.cat(sums) if len(sums) > 1 else sums[0]
    for (tensor, _), received in zip(tensors, parts(all_gather(mine, group)), strict=True):
        tensor.copy_(received.view(-1)[: tensor.numel()])
    return 2 * (ranks - 1) * mine.numel()


def _sum(parts: torch.Tensor) -> torch.Tensor:
    """See `sum_in_order`; in fp32 if they are in 16 bits."""
    return sum_in_order(parts.float() if parts.dtype in HALVES else parts)


class Cast(Wire):
    """Sends gradients in 16 bits: 2 (K - 1) / K * 2 bytes per element and rank, with K ranks."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        super().__init__(group)
        self._dtype = dtype

    def sum(self, tensor: torch.Tensor, keys: Sequence[tuple[int, int]], step: int) -> None:
        self.sent += sum_sent_as([(tensor, self._dtype)], self.group)
