"""The largest values of each gradient only, with error feedback."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from .wire import Residuals, Wire, all_gather, starts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch.distributed as dist

    from paceline.train.torch_types import StateDict


class TopK(Wire):
    """Sends the largest values of each gradient and their places, 8 bytes each, to K - 1 ranks.

    Source: Aji and Heafield 2017, arXiv:1704.05021.
    """

    def __init__(self, group: dist.ProcessGroup, fraction: float) -> None:
        super().__init__(group)
        self._fraction = fraction
        self._residuals = Residuals()

    def sum(self, tensor: torch.Tensor, keys: Sequence[tuple[int, int]], step: int) -> None:
        del step
        kept = self._residuals.of(keys, starts(keys), tensor.numel(), tensor)
        kept += tensor
        places = torch.cat(
            [
                begin + kept[begin : begin + count].abs().topk(math.ceil(self._fraction * count)).indices
                for (_, count), begin in zip(keys, starts(keys), strict=True)
            ]
        )
        values = kept[places].float()
        kept[places] = 0
        kept.nan_to_num_(0.0, 0.0, 0.0)
        sent = torch.cat([values.view(torch.int32), places.to(torch.int32)])
        received = all_gather(sent, self.group)
        self.sent += (self.ranks - 1) * sent.numel() * sent.element_size()
        tensor.zero_()
        for part in received.view(self.ranks, 2, -1):
            tensor.index_add_(0, part[1].long(), part[0].view(torch.float32).to(tensor.dtype))

    def state_dict(self) -> StateDict:
        return self._residuals.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._residuals.load_state_dict(state)
