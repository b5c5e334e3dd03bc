"""How gradients are sent between machines: as they are, or in fewer bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.train.torch_types import StateDict

    Start = Callable[[torch.Tensor, torch.Tensor], dist.Work]  # with what is received, and what is sent


# -- large tensors in pieces -------------------------------------------------------------------------------------------
# Collectives of one large tensor as several of its pieces.
#
# gloo sends all of a tensor at once. Where that is more than the queues of a slow network take, the two directions
# hold each other up, and get about half of what the network has. gloo's `all_reduce` sends pieces by itself.


_PIECE = 1 << 20  # bytes to each rank: less waits too often where packets take long, more is as slow as the whole
_AT_ONCE = 2  # pieces on the way; gloo has as many threads


def all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """What all ranks have for this one, in the order of ranks."""

    def start(received: torch.Tensor, sent: torch.Tensor) -> dist.Work:
        work: dist.Work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        return work

    ranks = dist.get_world_size(group)
    return _in_pieces(parts.view(ranks, -1), ranks, start)


def all_gather(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensors of all ranks, one after the other; each of one dimension and the same size."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name in older versions

    def start(received: torch.Tensor, sent: torch.Tensor) -> dist.Work:
        work: dist.Work = gather(received, sent, group=group, async_op=True)
        return work

    return _in_pieces(own.unsqueeze(0), dist.get_world_size(group), start)


def _in_pieces(rows: torch.Tensor, ranks: int, start: Start) -> torch.Tensor:
    """What is received when the columns of `rows` are sent, one row per rank."""
    out = rows.new_empty(ranks, rows.shape[1])
    size = max(1, _PIECE // rows.element_size())
    if rows.device.type != "cpu" or rows.shape[1] <= size:
        start(out.view(-1), rows.contiguous().view(-1)).wait()
        return out.view(-1)
    under_way: deque[tuple[dist.Work, torch.Tensor, torch.Tensor]] = deque()

    def finish() -> None:
        work, received, place = under_way.popleft()
        work.wait()
        place.copy_(received.view(ranks, -1))

    for sent, place in zip(torch.split(rows, size, 1), torch.split(out, size, 1), strict=True):
        received = rows.new_empty(ranks * sent.shape[1])
        under_way.append((start(received, sent.contiguous().view(-1)), received, place))
        if len(under_way) == _AT_ONCE:
            finish()
    while under_way:
        finish()
    return out.view(-1)


# -- error feedback ----------------------------------------------------------------------------------------------------
# Error feedback: what a compression has not sent of a gradient is added to the gradient of the next step.
#
# Source: Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019, arXiv:1901.09847.


class Residuals:
    """What was not sent, by parameters. Buckets change after the first step, and in a process that resumes."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[tuple[int, int], ...], torch.Tensor] = {}
        self._parts: dict[int, torch.Tensor] = {}  # of each parameter, inside of its bucket's tensor

    def of(
        self, keys: Sequence[tuple[int, int]], offsets: Sequence[int], size: int, like: torch.Tensor
    ) -> torch.Tensor:
        """The residuals of a bucket, in one tensor, to be changed in place."""
        found = self._buckets.get(tuple(keys))
        if found is not None:
            return found
        dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
        made = torch.zeros(size, dtype=dtype, device=like.device)
        for (number, count), offset in zip(keys, offsets, strict=True):
            part = made[offset : offset + count]
            if number in self._parts:
                part.copy_(self._parts[number])
            self._parts[number] = part
        numbers = {number for number, _ in keys}
        for other in [each for each in self._buckets if numbers & {number for number, _ in each}]:
            del self._buckets[other]
        self._buckets[tuple(keys)] = made
        return made

    def state_dict(self) -> StateDict:
        """The residuals by the number of the parameter."""
        return {str(number): part.clone() for number, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with these."""
        self._buckets.clear()
        self._parts = {int(number): part for number, part in state.items()}


def starts(keys: Sequence[tuple[int, int]]) -> list[int]:
    """Where each gradient begins in its bucket."""
    found, at = [], 0
    for _, count in keys:
        found.append(at)
        at += count
    return found


# -- wires -------------------------------------------------------------------------------------------------------------


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

    def state_dict(self) -> StateDict:
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
