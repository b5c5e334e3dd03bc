"""Collectives of one large tensor as several of its pieces.

gloo sends all of a tensor at once. Where that is more than the queues of a slow network take, the two directions
hold each other up, and get about half of what the network has. gloo's `all_reduce` sends pieces by itself.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[[torch.Tensor, torch.Tensor], dist.Work]  # with what is received, and what is sent

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
