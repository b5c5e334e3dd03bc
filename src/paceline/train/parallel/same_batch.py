"""Whether ranks that compute a model together were given the same batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from paceline.train.data.content import Content

from .nested import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable

COMPARED = 3  # of the first passes


def other_batches(passed: Iterable[Any], ranks: dist.ProcessGroup) -> str:
    """The line for ranks that were given different batches; "" if they were not. A collective of these ranks.

    Args:
        passed: what a model was called with.
        ranks: those that compute it together.
    """
    content = Content()
    for tensor in tensors_in(list(passed)):
        content.add(tensor)
    every: list[Any] = [None] * dist.get_world_size(ranks)
    dist.all_gather_object(every, content.total, group=ranks)
    if len({*every}) == 1:
        return ""
    return (
        f"ranks {', '.join(map(str, dist.get_process_group_ranks(ranks)))} compute a model together, and were given "
        "different batches: take them from run.dataloader, or give these ranks the same ones"
    )
