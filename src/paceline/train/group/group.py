"""The ranks of a job as one of them sees them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch.distributed as dist

from .collectives import Collectives

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from .join import Membership


class Group(Collectives):
    """This rank's place among the ranks, and the collectives of all ranks.

    Args:
        membership: what `join` returned.
        guard: context of all that the ranks do together; it may be nested. If that fails, it raises what is known of
            the other ranks. The default does nothing.
    """

    def __init__(self, membership: Membership, guard: contextlib.AbstractContextManager[None] | None = None) -> None:
        self.guard = guard or contextlib.nullcontext()
        self._membership = membership

    @property
    def rank(self) -> int:
        """Position among all ranks, 0 … world_size - 1."""
        return self._membership.placement.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._membership.placement.world_size

    @property
    def local_rank(self) -> int:
        """Position among the ranks of this machine."""
        return self._membership.placement.local_rank

    @property
    def attempt(self) -> int:
        """Number of restarts of the job before this start."""
        return self._membership.placement.attempt

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._membership.device

    @property
    def owns_process_group(self) -> bool:
        """Whether torch's process group was created for this run, and ends with it."""
        return self._membership.owns_group and dist.is_initialized()

    def _together(self) -> contextlib.AbstractContextManager[None]:
        return self.guard

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to sum a tensor over all ranks, in place. Returns a function that waits for the sum."""
        if self.world_size == 1:
            return lambda: tensor
        with self.guard:
            work = dist.all_reduce(tensor, async_op=True)

        def wait() -> Tensor:
            with self.guard:
                work.wait()
            return tensor

        return wait
