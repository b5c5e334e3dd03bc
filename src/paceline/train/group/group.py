"""The ranks of a job as one of them sees them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch.distributed as dist

from .collectives import Collectives

if TYPE_CHECKING:
    import torch
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

    def start_all_reduce(self, tensor: Tensor) -> Started:
        """Start to sum a tensor over all ranks, in place; calling what this returns waits for the sum."""
        if self.world_size == 1:
            return Started(tensor, None, self.guard)
        with self.guard:
            return Started(tensor, dist.all_reduce(tensor, async_op=True), self.guard)
