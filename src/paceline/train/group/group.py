"""The ranks of a job as one of them sees them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch.distributed as dist

from .collectives import Collectives

if TYPE_CHECKING:
    from torch import Tensor

    from .join import Membership


class Started:
    """A collective of one tensor that was started; calling it waits for the result.

    Args:
        tensor: becomes the result.
        work: torch's handle; None if the result is there.
        guard: see `Group`.
    """

    def __init__(self, tensor: Tensor, work: dist.Work | None, guard: contextlib.AbstractContextManager[None]) -> None:
        self._tensor, self._work, self._guard = tensor, work, guard

    def __call__(self) -> Tensor:
        """Wait for the result. For the guard all ranks are here, so each calls it as often as the others."""
        if self._work is not None:
            with self._guard:
                self._work.wait()
        return self._tensor

    def peek(self) -> Tensor | None:
        """The result if it is there; None if not, or if the collective has failed. Any rank may call it."""
        if self._work is not None:
            if not self._work.is_completed():
                return None
            try:
                self._work.wait()
            except RuntimeError:  # `__call__` says why
                return None
        return self._tensor


class Group(Collectives):
    """This rank's place among the ranks, and the collectives of all ranks.

    Args:
        membership: what `join` returned.
        guard: context of all that the ranks do together; it may be nested. If that fails, it raises what is known of
            the other ranks. The default does nothing.

    Attributes:
        local_rank: position among the ranks of this machine.
        attempt: number of restarts of the job before this start.
        device: this rank's device.
    """

    def __init__(self, membership: Membership, guard: contextlib.AbstractContextManager[None] | None = None) -> None:
        placement = membership.placement
        self.rank, self.world_size = placement.rank, placement.world_size
        self.local_rank, self.attempt, self.device = placement.local_rank, placement.attempt, membership.device
        self.guard = self._guard = guard or contextlib.nullcontext()
        self._owns_group = membership.owns_group

    @property
    def owns_process_group(self) -> bool:
        """Whether torch's process group was created for this run, and ends with it."""
        return self._owns_group and dist.is_initialized()

    def start_all_reduce(self, tensor: Tensor) -> Started:
        """Start to sum a tensor over all ranks, in place; calling what this returns waits for the sum."""
        if self.world_size == 1:
            return Started(tensor, None, self.guard)
        with self.guard:
            return Started(tensor, dist.all_reduce(tensor, async_op=True), self.guard)
