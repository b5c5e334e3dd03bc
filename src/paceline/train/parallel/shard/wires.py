"""How the ranks that share a model gather its parameters and sum its gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.train.group.group import Group


class _Comm:
    def __init__(self, owner: Wires, gathers: bool) -> None:
        self._owner, self._gathers = owner, gathers

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a collective."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any = None,
        async_op: bool = False,
    ) -> Any:
        if self._gathers:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


class Wires:
    def __init__(self, group: Group, ranks: Sequence[int], process_group: dist.ProcessGroup) -> None:
        self.sent = 0
        self.all_gather, self.reduce_scatter = _Comm(self, True), _Comm(self, False)

    def close(self) -> None:
        """Give back what it holds."""
